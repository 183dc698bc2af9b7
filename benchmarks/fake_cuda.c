/* A CUDA driver without a GPU, for `benchmarks.lanes`: the server loads it as libcuda.so.1.
 *
 * No byte is copied. A call keeps its thread as long as it does on a real host (FAKE_PIECE_NS a piece,
 * FAKE_CALL_NS at least), without the interpreter lock, as ctypes calls it; a copy then takes its
 * share of a link of FAKE_LINK_BYTES_S a GPU and direction, which is a clock. One thread, the GPUs'
 * front ends, writes counts to boards when they are due. With FAKE_AWAY a call sleeps instead of
 * computing: as if every thread that calls had a core of its own.
 *
 * What has happened is in the file FAKE_LOG, as `struct log` (which `benchmarks.lanes` reads).
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { GPUS = 8, COUNTS = 1 << 16, PENDING = 1 << 16, BOARDS = 64, LINE = 64, PLACED_LINE = 4 };
enum { SUCCESS = 0, NOT_READY = 600 };

struct log {
    uint64_t calls_ns, calls, front_end_ns; /* CPU in calls and how many; CPU of the front ends */
    uint64_t landed_ns[GPUS][COUNTS];       /* when a count was reached, by count modulo COUNTS */
};
struct stream {
    int gpu;
    uint64_t done_ns;
};
struct write {
    uint64_t due_ns;
    volatile uint32_t *word, *placed;
    uint32_t value;
};
struct copy_attributes {
    int source_access_order;
};

static struct log *record_of;
static uint64_t piece_ns, call_ns, write_ns, link_bytes_s, loops_a_us;
static int is_away, has_rings, visible;
static uint64_t link_free_ns[GPUS][2];
static struct { /* of one GPU, in order of their due times; one lane writes to it */
    struct write writes[PENDING];
    uint64_t begin, end;
} pending[GPUS];
static struct { char *address; size_t nbytes; } boards[BOARDS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int current;

static uint64_t now_ns(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void sleep_until(uint64_t due_ns) {
    if (due_ns <= now_ns(CLOCK_MONOTONIC)) return;
    struct timespec t = {(time_t)(due_ns / 1000000000u), (long)(due_ns % 1000000000u)};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
}

static void compute(uint64_t loops) {
    volatile uint64_t x = 1;
    while (loops--) x = x * 3 + 1;
}

/* Keep the calling thread: by so much computing, not until a time, so that a thread that the kernel
 * has set aside meanwhile still does all of it. */
static void spend(uint64_t ns) {
    if (ns && is_away) sleep_until(now_ns(CLOCK_MONOTONIC) + ns);
    else compute(ns * loops_a_us / 1000);
}

/* Count what the thread computes in a call, in the kernel too: all that is not Python's. */
static uint64_t enter(void) { return now_ns(CLOCK_THREAD_CPUTIME_ID); }
static int leave(uint64_t entered_ns, int code) {
    uint64_t took_ns = now_ns(CLOCK_THREAD_CPUTIME_ID) - entered_ns;
    __atomic_fetch_add(&record_of->calls_ns, took_ns, __ATOMIC_RELAXED);
    __atomic_fetch_add(&record_of->calls, 1, __ATOMIC_RELAXED);
    return code;
}

static void *front_ends(void *_) {
    prctl(PR_SET_TIMERSLACK, 1);
    for (;;) {
        uint64_t now = now_ns(CLOCK_MONOTONIC);
        for (int gpu = 0; gpu < visible; gpu++) {
            uint64_t end = __atomic_load_n(&pending[gpu].end, __ATOMIC_ACQUIRE);
            while (pending[gpu].begin != end) {
                struct write *w = &pending[gpu].writes[pending[gpu].begin % PENDING];
                if (w->due_ns > now) break;
                *w->word = w->value;
                if (w->placed) *w->placed = w->value;
                pending[gpu].begin++;
            }
        }
        record_of->front_end_ns = now_ns(CLOCK_THREAD_CPUTIME_ID);
        sleep_until(now + 100000);
    }
    return _;
}

static uint64_t setting(const char *name) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : 0;
}

__attribute__((constructor)) static void begin(void) {
    if (!getenv("FAKE_LOG")) abort();
    piece_ns = setting("FAKE_PIECE_NS");
    call_ns = setting("FAKE_CALL_NS");
    write_ns = setting("FAKE_WRITE_NS");
    link_bytes_s = setting("FAKE_LINK_BYTES_S");
    is_away = (int)setting("FAKE_AWAY");
    has_rings = (int)setting("FAKE_RINGS");
    visible = (int)setting("FAKE_GPUS");
    int fd = open(getenv("FAKE_LOG"), O_RDWR);
    record_of = mmap(NULL, sizeof *record_of, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd < 0 || record_of == MAP_FAILED || visible > GPUS) abort();
    uint64_t best = UINT64_MAX; /* the fastest of many: undisturbed */
    for (int round = 0; round < 50; round++) {
        uint64_t began = now_ns(CLOCK_MONOTONIC);
        compute(200000);
        uint64_t took = now_ns(CLOCK_MONOTONIC) - began;
        if (took < best) best = took;
    }
    loops_a_us = 200000u * 1000u / best;
    pthread_t thread;
    pthread_create(&thread, NULL, front_ends, NULL);
}

int cuInit(unsigned flags) { return SUCCESS; }
int cuDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
int cuDeviceGetCount(int *count) { return *count = visible, SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, SUCCESS; }
int cuDeviceGetUuid_v2(char *uuid, int device) {
    return memset(uuid, device + 1, 16), SUCCESS;
}
int cuDeviceGetPCIBusId(char *text, int length, int device) {
    return strncpy(text, "none", (size_t)length), SUCCESS;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    return *context = (void *)(intptr_t)(device + 1), SUCCESS;
}
int cuCtxSetCurrent(void *context) { return current = (int)(intptr_t)context - 1, SUCCESS; }
int cuCtxGetDevice(int *device) { return *device = current, SUCCESS; }
int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t pointer) {
    return *base = pointer, *size = (size_t)1 << 46, SUCCESS;
}
struct handle { char reserved[64]; };
int cuIpcOpenMemHandle_v2(uint64_t *pointer, struct handle handle, unsigned flags) {
    return memcpy(pointer, handle.reserved, sizeof *pointer), SUCCESS; /* as the engine says */
}
int cuIpcCloseMemHandle(uint64_t pointer) { return SUCCESS; }

int cuMemHostRegister_v2(char *address, size_t nbytes, unsigned flags) {
    if (nbytes > 1 << 20) return SUCCESS; /* of the arena */
    pthread_mutex_lock(&lock);
    for (int i = 0; i < BOARDS; i++)
        if (!boards[i].address) {
            boards[i].nbytes = nbytes, boards[i].address = address;
            break;
        }
    return pthread_mutex_unlock(&lock), SUCCESS;
}
int cuMemHostUnregister(char *address) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < BOARDS; i++)
        if (boards[i].address == address) boards[i].address = NULL;
    return pthread_mutex_unlock(&lock), SUCCESS;
}
int cuMemHostGetDevicePointer_v2(uint64_t *pointer, void *address, unsigned flags) {
    return *pointer = (uint64_t)address, SUCCESS;
}

int cuStreamCreate(void **stream, unsigned flags) {
    struct stream *made = calloc(1, sizeof *made);
    made->gpu = current;
    return *stream = made, SUCCESS;
}
int cuEventCreate(void **event, unsigned flags) {
    return *event = calloc(1, sizeof(uint64_t)), SUCCESS;
}
int cuEventRecord(uint64_t *event, struct stream *stream) {
    uint64_t entered_ns = enter();
    spend(call_ns / 8);
    *event = stream->done_ns;
    return leave(entered_ns, SUCCESS);
}
int cuEventQuery(uint64_t *event) {
    uint64_t entered_ns = enter();
    int code = *event <= now_ns(CLOCK_MONOTONIC) ? SUCCESS : NOT_READY;
    return leave(entered_ns, code);
}
int cuEventSynchronize(uint64_t *event) {
    uint64_t entered_ns = enter();
    sleep_until(*event);
    return leave(entered_ns, SUCCESS);
}
int cuStreamSynchronize(struct stream *stream) { return sleep_until(stream->done_ns), SUCCESS; }
int cuStreamWaitEvent(struct stream *stream, uint64_t *event, unsigned flags) {
    uint64_t entered_ns = enter();
    spend(call_ns / 8);
    if (*event > stream->done_ns) stream->done_ns = *event;
    return leave(entered_ns, SUCCESS);
}

int cuMemcpyBatchAsync_v2(
    void **targets, void **sources, size_t *sizes, size_t count, struct copy_attributes *attributes,
    size_t *indices, size_t attribute_count, struct stream *stream) {
    uint64_t entered_ns = enter(), nbytes = 0, cost_ns = count * piece_ns;
    for (size_t i = 0; i < count; i++) nbytes += sizes[i];
    spend(cost_ns > call_ns ? cost_ns : call_ns);
    uint64_t *free_ns = &link_free_ns[stream->gpu][attributes->source_access_order == 1];
    pthread_mutex_lock(&lock); /* two threads may issue on one link */
    uint64_t start_ns = now_ns(CLOCK_MONOTONIC);
    if (*free_ns > start_ns) start_ns = *free_ns;
    *free_ns = start_ns + (uint64_t)((double)nbytes * 1e9 / (double)link_bytes_s);
    if (*free_ns > stream->done_ns) stream->done_ns = *free_ns;
    pthread_mutex_unlock(&lock);
    return leave(entered_ns, SUCCESS);
}

int cuStreamWriteValue32_v2(struct stream *stream, uint64_t pointer, unsigned value, unsigned flags) {
    uint64_t entered_ns = enter();
    spend(write_ns);
    uint64_t now = now_ns(CLOCK_MONOTONIC);
    struct write w = {stream->done_ns > now ? stream->done_ns : now, (uint32_t *)pointer, NULL, value};
    for (int i = 0; has_rings && i < BOARDS; i++) { /* the engine's GPU places each record at once */
        uint64_t board = (uint64_t)boards[i].address;
        if (board && board <= pointer && pointer < board + boards[i].nbytes)
            w.placed = (uint32_t *)(board + PLACED_LINE * LINE);
    }
    record_of->landed_ns[stream->gpu][value % COUNTS] = w.due_ns;
    pending[stream->gpu].writes[pending[stream->gpu].end % PENDING] = w;
    __atomic_store_n(&pending[stream->gpu].end, pending[stream->gpu].end + 1, __ATOMIC_RELEASE);
    return leave(entered_ns, SUCCESS);
}

/* Calls that a server does not make. */
#define MISSING(name) int name(void) { return 999; }
MISSING(cuIpcGetMemHandle) MISSING(cuCtxSynchronize) MISSING(cuStreamWaitValue32_v2)
MISSING(cuEventDestroy_v2) MISSING(cuMemcpyHtoDAsync_v2) MISSING(cuMemcpyDtoHAsync_v2)
MISSING(cuGetErrorString) MISSING(cuStreamCreateWithPriority) MISSING(cuDeviceGetAttribute)
MISSING(cuModuleLoadData) MISSING(cuModuleGetFunction) MISSING(cuMemAlloc_v2) MISSING(cuMemFree_v2)
MISSING(cuLaunchKernelEx) MISSING(cuStreamBatchMemOp_v2)
