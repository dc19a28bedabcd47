/* Stand-ins of libcuda's virtual memory calls and of libcudart's unified memory calls, on mmap.

   Strict where the real ones are, or stricter: sizes and addresses in whole grains, ranges reserved and free before they
   are mapped, access only over what is fully mapped, one unmap of whole mappings. Device memory is host memory that has
   no access until cuMemSetAccess and again none after cuMemUnmap: touching it then ends the process, as it should.
   Fresh memory is dirty. fake_fail_at(k) makes the kth call from then on fail and do nothing. */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int CUresult;
typedef uint64_t CUdeviceptr;
typedef unsigned long long Handle;
typedef struct { int type, id; } Location;
typedef struct {
    int type, requestedHandleTypes;
    Location location;
    void *win32HandleMetaData;
    struct { unsigned char compressionType, gpuDirectRDMACapable; unsigned short usage; unsigned char reserved[4]; } allocFlags;
} Prop;
typedef struct { Location location; int flags; } Access;

enum { SUCCESS = 0, INVALID = 1, OUT_OF_MEMORY = 2, INJECTED = 999, SLOTS = 4096 };
static const size_t GRAIN = 1 << 16;

static struct { int used, fd, released, mapped; size_t size; } memory[SLOTS];
static struct { int used; CUdeviceptr address; size_t size; } reserved[SLOTS];
static struct { int used, access; Handle handle; CUdeviceptr address; size_t size; } mapping[SLOTS];
static size_t limit = (size_t)1 << 40;
static long countdown = -1, num_calls;
static int vmm_supported = 1, initialised;
static char last[256];

static int fails(void) {
    num_calls++;
    return countdown > 0 && --countdown == 0;
}
static CUresult refuse(const char *why) {
    snprintf(last, sizeof last, "%s", why);
    return INVALID;
}
#define CALL if (fails()) return INJECTED
#define NEED(condition) if (!(condition)) return refuse(#condition)

static size_t taken(void) {
    size_t sum = 0;
    for (int i = 0; i < SLOTS; i++) if (memory[i].used) sum += memory[i].size;
    return sum;
}
static void drop_unheld(int i) {
    if (memory[i].used && memory[i].released && !memory[i].mapped) {
        close(memory[i].fd);
        memory[i].used = 0;
    }
}
static int prop_is_right(const Prop *p) {
    return p && p->type == 1 && p->requestedHandleTypes == 0 && p->location.type == 1 && p->location.id == 0 &&
           p->win32HandleMetaData == NULL && p->allocFlags.compressionType == 0 && p->allocFlags.usage == 0;
}

/* what the tests ask */
void fake_fail_at(long k) { countdown = k; }
void fake_set_limit(size_t bytes) { limit = bytes; }
void fake_set_supported(int yes) { vmm_supported = yes; }
long fake_num_calls(void) { return num_calls; }
size_t fake_taken_bytes(void) { return taken(); }
size_t fake_reserved_bytes(void) {
    size_t sum = 0;
    for (int i = 0; i < SLOTS; i++) if (reserved[i].used) sum += reserved[i].size;
    return sum;
}
long fake_num_held_handles(void) {
    long n = 0;
    for (int i = 0; i < SLOTS; i++) n += memory[i].used && !memory[i].released;
    return n;
}
const char *fake_last_refusal(void) { return last; }


/* libcuda */
CUresult cuInit(unsigned flags) { CALL; NEED(flags == 0); initialised = 1; return SUCCESS; }
CUresult cuGetErrorString(CUresult code, const char **text) {
    *text = code == OUT_OF_MEMORY ? "out of memory" : code == INJECTED ? "injected" : last;
    return SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    CALL;
    NEED(initialised && device == 0 && attribute == 102);
    *value = vmm_supported;
    return SUCCESS;
}
CUresult cuMemGetAllocationGranularity(size_t *grain, const Prop *prop, int option) {
    CALL;
    NEED(prop_is_right(prop) && (option == 0 || option == 1));
    *grain = GRAIN;
    return SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint, unsigned long long flags) {
    CALL;
    NEED(size > 0 && size % GRAIN == 0 && (alignment & (alignment - 1)) == 0 && flags == 0 && hint == 0);
    char *p = mmap(NULL, size + GRAIN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return OUT_OF_MEMORY;
    size_t skip = (GRAIN - (uintptr_t)p % GRAIN) % GRAIN;
    if (skip) munmap(p, skip);
    if (GRAIN - skip) munmap(p + skip + size, GRAIN - skip);
    for (int i = 0; i < SLOTS; i++) if (!reserved[i].used) {
        reserved[i].used = 1, reserved[i].address = *address = (CUdeviceptr)(p + skip), reserved[i].size = size;
        return SUCCESS;
    }
    return OUT_OF_MEMORY;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    CALL;
    for (int i = 0; i < SLOTS; i++)
        NEED(!(mapping[i].used && mapping[i].address >= address && mapping[i].address < address + size));
    for (int i = 0; i < SLOTS; i++) if (reserved[i].used && reserved[i].address == address && reserved[i].size == size) {
        munmap((void *)address, size);
        reserved[i].used = 0;
        return SUCCESS;
    }
    return refuse("not what was reserved");
}
CUresult cuMemCreate(Handle *handle, size_t size, const Prop *prop, unsigned long long flags) {
    CALL;
    NEED(prop_is_right(prop) && flags == 0 && size > 0 && size % GRAIN == 0);
    if (taken() + size > limit) return OUT_OF_MEMORY;
    for (int i = 1; i < SLOTS; i++) if (!memory[i].used) {
        int fd = memfd_create("fake device", 0);
        if (fd < 0 || ftruncate(fd, (off_t)size)) return OUT_OF_MEMORY;
        char dirt[4096];
        memset(dirt, 0xA5, sizeof dirt);
        for (size_t at = 0; at < size; at += sizeof dirt) if (pwrite(fd, dirt, sizeof dirt, (off_t)at) < 0) return OUT_OF_MEMORY;
        memory[i].used = 1, memory[i].fd = fd, memory[i].released = memory[i].mapped = 0, memory[i].size = size;
        *handle = (Handle)i;
        return SUCCESS;
    }
    return OUT_OF_MEMORY;
}
CUresult cuMemRelease(Handle handle) {
    CALL;
    NEED(handle > 0 && handle < SLOTS && memory[handle].used && !memory[handle].released);
    memory[handle].released = 1;
    drop_unheld((int)handle);
    return SUCCESS;
}
CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, Handle handle, unsigned long long flags) {
    CALL;
    NEED(address % GRAIN == 0 && size % GRAIN == 0 && size > 0 && offset == 0 && flags == 0);
    NEED(handle > 0 && handle < SLOTS && memory[handle].used && !memory[handle].released && size <= memory[handle].size);
    int inside = 0;
    for (int i = 0; i < SLOTS; i++) {
        inside |= reserved[i].used && address >= reserved[i].address && address + size <= reserved[i].address + reserved[i].size;
        NEED(!(mapping[i].used && address < mapping[i].address + mapping[i].size && mapping[i].address < address + size));
    }
    NEED(inside);
    for (int i = 0; i < SLOTS; i++) if (!mapping[i].used) {
        if (mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory[handle].fd, 0) == MAP_FAILED) return OUT_OF_MEMORY;
        mapping[i].used = 1, mapping[i].access = 0, mapping[i].handle = handle, mapping[i].address = address, mapping[i].size = size;
        memory[handle].mapped++;
        return SUCCESS;
    }
    return OUT_OF_MEMORY;
}
static size_t covered(CUdeviceptr address, size_t size) { /* by whole mappings */
    size_t sum = 0;
    for (int i = 0; i < SLOTS; i++) if (mapping[i].used && mapping[i].address < address + size && mapping[i].address + mapping[i].size > address) {
        if (mapping[i].address < address || mapping[i].address + mapping[i].size > address + size) return 0;
        sum += mapping[i].size;
    }
    return sum;
}
CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const Access *access, size_t count) {
    CALL;
    NEED(count == 1 && access->location.type == 1 && access->location.id == 0 && access->flags == 3);
    NEED(covered(address, size) == size);
    return mprotect((void *)address, size, PROT_READ | PROT_WRITE) ? OUT_OF_MEMORY : SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    CALL;
    NEED(size > 0 && covered(address, size) == size);
    if (mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) return OUT_OF_MEMORY;
    for (int i = 0; i < SLOTS; i++) if (mapping[i].used && mapping[i].address >= address && mapping[i].address < address + size) {
        mapping[i].used = 0;
        memory[mapping[i].handle].mapped--;
        drop_unheld((int)mapping[i].handle);
    }
    return SUCCESS;
}

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
#if RUNTIME_VERSION >= 13000
int cudaMemPrefetchAsync(const void *address, size_t size, PLACE, unsigned flags, void *stream) {
    RUNTIME;
    MUST(flags == 0 && !stream);
    CHECK_PLACE;
    MUST(is_inside(address, size));
    note("prefetch %ld %ld\n", offset_of(address), (long)size, 0, 0);
    return 0;
}
int cudaMemDiscardBatchAsync(void **addresses, size_t *sizes, size_t count, unsigned long long flags, void *stream) {
    RUNTIME;
    MUST(count == 1 && flags == 0 && is_inside(addresses[0], sizes[0]) && !stream);
    note("discard %ld %ld\n", offset_of(addresses[0]), (long)sizes[0], 0, 0);
    return 0;
}
#else
int cudaMemPrefetchAsync(const void *address, size_t size, PLACE, void *stream) {
    RUNTIME;
    CHECK_PLACE;
    MUST(is_inside(address, size) && !stream);
    note("prefetch %ld %ld\n", offset_of(address), (long)size, 0, 0);
    return 0;
}
#endif
