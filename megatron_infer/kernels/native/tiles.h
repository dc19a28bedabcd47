// The CPU's matrix registers (AMX): eight tiles of 16 rows by 64 bytes, and products of two tiles of bf16 added to one of fp32.
//
// A product adds 32 inner entries at once, even ones and odd ones apart: other bits than those of a chain of dot products.
// So whether a sum uses tiles depends on the machine and the operand's shape, never on the number of tokens.
#pragma once

#include "common.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__) && MI_BF16_DOT
#define MI_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define MI_TILES 0
#endif

#if MI_TILES
namespace mi {

constexpr int kTileLines = 16;   // rows of a tile
constexpr int kTileInner = 32;   // bf16 in a row: inner entries of one product

// Whether the kernel lets this process use tiles; asked once, and then true of all of its threads.
inline bool tiles_allowed() {
    constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool allowed = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    return allowed;
}

// What was written to `memory` is there for a tile's load, which compilers do not know to read.
inline void before_tiles(const void* memory) { asm volatile("" ::"r"(memory) : "memory"); }

// Shapes of this thread's tiles: 0, 1 sums and 4 operand of `first` rows; 2, 3 and 5 the same of `second`; 6, 7 panels.
// Clears all of them.
inline void shape_tiles(int first, int second) {
    struct alignas(64) {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t lines[16];
    } shapes = {};
    shapes.palette = 1;
    const int lines[8] = {first, first, second, second, first, second, kTileLines, kTileLines};
    for (int i = 0; i < 8; ++i) {
        shapes.bytes[i] = lines[i] ? 64 : 0;
        shapes.lines[i] = (uint8_t)lines[i];
    }
    before_tiles(&shapes);  // compilers know of its first 8 bytes alone
    _tile_loadconfig(&shapes);
}

// Tiles in use make every switch of threads slower.
inline void release_tiles() { _tile_release(); }

// C (+)= A . B for `groups` of 16 rows and `columns` of 16, over `steps` of 32 inner entries. B holds pairs of inner entries:
// [pair][column][2], with `b_line` elements from pair to pair. Shapes: shape_tiles(16, 16).
template <bool Accumulate>
inline void multiply_tiles(const bf16* a, int a_stride, const bf16* b, int b_line, int groups, int columns, int steps, float* c,
                           int c_stride) {
    before_tiles(a);
    before_tiles(c);
    for (int g = 0; g < groups; g += 2)
        for (int j = 0; j < columns; j += 2) {
            const bool rows = g + 1 < groups, wide = j + 1 < columns;
            float *c0 = c + g * kTileLines * c_stride + j * W, *c2 = c0 + kTileLines * c_stride;
            const int64_t line = c_stride * 4;
            if constexpr (Accumulate) {
                _tile_loadd(0, c0, line);
                if (wide) _tile_loadd(1, c0 + W, line);
                if (rows) _tile_loadd(2, c2, line);
                if (rows && wide) _tile_loadd(3, c2 + W, line);
            } else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int k = 0; k < steps; ++k) {
                const bf16* from = a + g * kTileLines * a_stride + k * kTileInner;
                const bf16* column = b + (k * kTileLines) * b_line + j * kTileInner;
                _tile_loadd(4, from, a_stride * 2);
                _tile_loadd(6, column, b_line * 2);
                _tile_dpbf16ps(0, 4, 6);
                if (wide) {
                    _tile_loadd(7, column + kTileInner, b_line * 2);
                    _tile_dpbf16ps(1, 4, 7);
                }
                if (rows) {
                    _tile_loadd(5, from + kTileLines * a_stride, a_stride * 2);
                    _tile_dpbf16ps(2, 5, 6);
                    if (wide) _tile_dpbf16ps(3, 5, 7);
                }
            }
            _tile_stored(0, c0, line);
            if (wide) _tile_stored(1, c0 + W, line);
            if (rows) _tile_stored(2, c2, line);
            if (rows && wide) _tile_stored(3, c2 + W, line);
        }
}

}  // namespace mi
#endif
