/* A stand-in of libcudart's unified memory calls, on mmap; strict where the real ones are, or stricter.

   fake_fail_at(k) makes the kth call from then on fail and do nothing. */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

typedef struct { int type, id; } Location;

enum { INVALID = 1, OUT_OF_MEMORY = 2, INJECTED = 999 };
static size_t limit = (size_t)1 << 40;
static long countdown = -1;
static char last[256];

static int fails(void) {
    return countdown > 0 && --countdown == 0;
}
static int refuse(const char *why) {
    snprintf(last, sizeof last, "%s", why);
    return INVALID;
}

/* what the tests ask */
void fake_fail_at(long k) { countdown = k; }
void fake_set_limit(size_t bytes) { limit = bytes; }
const char *fake_last_refusal(void) { return last; }


/* libcudart; RUNTIME_VERSION is 12080 or 13000 */
static char journal[1 << 16];
static int managed_supported = 1, concurrent_supported = 1, pending;
static void *managed_address;
static size_t managed_size;

const char *fake_journal(void) { return journal; }
void fake_clear_journal(void) { journal[0] = 0; }
void fake_set_managed(int managed, int concurrent) { managed_supported = managed, concurrent_supported = concurrent; }
int fake_pending_error(void) { return pending; }
size_t fake_managed_bytes(void) { return managed_size; }
static void note(const char *format, long a, long b, long c, long d) {
    size_t used = strlen(journal);
    snprintf(journal + used, sizeof journal - used, format, a, b, c, d);
}
static long offset_of(const void *p) { return (long)((const char *)p - (char *)managed_address); }
static int is_inside(const void *p, size_t n) { return offset_of(p) >= 0 && offset_of(p) + n <= managed_size; }
#define RUNTIME if (fails()) return pending = INJECTED
#define MUST(condition) if (!(condition)) return pending = refuse(#condition)

int cudaRuntimeGetVersion(int *version) { *version = RUNTIME_VERSION; return 0; }
int cudaGetLastError(void) { int code = pending; pending = 0; return code; }
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    RUNTIME;
    MUST(device == 0 && (attribute == 83 || attribute == 89));
    *value = attribute == 83 ? managed_supported : concurrent_supported;
    return 0;
}
int cudaMallocManaged(void **address, size_t size, unsigned flags) {
    RUNTIME;
    MUST(size > 0 && flags == 1 && !managed_size);
    if (size > limit) return pending = OUT_OF_MEMORY;
    *address = managed_address = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    managed_size = size;
    return 0;
}
int cudaFree(void *address) {
    RUNTIME;
    MUST(address == managed_address && managed_size);
    munmap(address, managed_size);
    managed_size = 0;
    return 0;
}
#if RUNTIME_VERSION >= 13000
#define PLACE Location place
#define CHECK_PLACE MUST(place.type == 1 && place.id == 0)
#else
#define PLACE int place
#define CHECK_PLACE MUST(place == 0)
#endif
int cudaMemAdvise(const void *address, size_t size, int advice, PLACE) {
    RUNTIME;
    CHECK_PLACE;
    MUST(is_inside(address, size));
    note("advise %ld\n", advice, 0, 0, 0);
    return 0;
}
