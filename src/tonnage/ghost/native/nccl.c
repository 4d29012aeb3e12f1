/* NCCL.  Every operation is logged.  Where the other ranks of a communicator are real processes (GHOST_REAL_RANKS
 * or torchrun say so), small payloads are truly exchanged; else the others are taken to hold what this rank holds:
 * a sum is this rank's value times the number of ranks, gathered parts are all alike.  Larger payloads carry no
 * values either way. */
#define _GNU_SOURCE
#include "ghost.h"
#include "ranks.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { NCCL_SUCCESS, NCCL_UNHANDLED_CUDA_ERROR, NCCL_SYSTEM_ERROR, NCCL_INVALID_ARGUMENT = 4, NCCL_INVALID_USAGE = 5, NCCL_REMOTE_ERROR = 6 };
enum { OP_SUM, OP_PROD, OP_MAX, OP_MIN, OP_AVG };

#if GHOST_CUDA == 12
#define NCCL_VERSION 22703
#else
#define NCCL_VERSION 22907
#endif

typedef struct {
    char internal[128];
} ncclUniqueId;

struct ncclComm {
    int ranks, rank, device; /* ranks 0: a part of an emulated communicator whose size nobody told us */
    uint32_t id;             /* small number for the log */
    uint64_t key;
    uint32_t splits;
    struct meeting *meeting; /* NULL: the other ranks are emulated */
    bool connected;          /* its buffers were taken */
    bool *met;               /* by rank: whether buffers for direct messages were taken, or were many enough */
    int peers;               /* for so many ranks they were taken */
    uint64_t taken;          /* bytes of its card */
};
typedef struct ncclComm *ncclComm_t;

static uint32_t communicator_count;
static __thread char last_error[256];

/* ---- data types ---- */

static const size_t type_bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 };

static size_t bytes_of(size_t count, int type)
{
    return type >= 0 && type < (int)(sizeof type_bytes / sizeof *type_bytes) ? count * type_bytes[type] : 0;
}

static float from_bfloat16(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t to_bfloat16(float value)
{
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    return (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}

static float from_float16(uint16_t bits)
{
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float value = exponent ? ldexpf((float)(fraction + 1024), exponent - 25) : ldexpf((float)fraction, -24);
    if (exponent == 31)
        value = fraction ? NAN : INFINITY;
    return bits >> 15 ? -value : value;
}

static uint16_t to_float16(float value)
{
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    float size = fabsf(value);
    if (isnan(value))
        return 0x7e00;
    if (size >= 65520)
        return sign | 0x7c00;
    if (size < 6.103515625e-05f)
        return sign | (uint16_t)lrintf(ldexpf(size, 24));
    int exponent;
    float fraction = frexpf(size, &exponent); /* in [0.5, 1) */
    return sign | (uint16_t)((uint32_t)(exponent + 13) * 1024 + (uint32_t)lrintf(ldexpf(fraction, 11)));
}

/* ---- reductions: target = target (op) source, element by element ---- */

#define COMBINE(type, count)                                                \
    for (size_t i = 0; i < (count); i++) {                                  \
        type x, y, z;                                                       \
        memcpy(&x, target + i * sizeof x, sizeof x);                        \
        memcpy(&y, source + i * sizeof y, sizeof y);                        \
        z = op == OP_PROD  ? (type)(x * y)                                  \
            : op == OP_MAX ? (x > y ? x : y)                                \
            : op == OP_MIN ? (x < y ? x : y)                                \
                           : (type)(x + y);                                 \
        memcpy(target + i * sizeof z, &z, sizeof z);                        \
    }

static float combine_floats(float x, float y, int op)
{
    return op == OP_PROD ? x * y : op == OP_MAX ? fmaxf(x, y) : op == OP_MIN ? fminf(x, y) : x + y;
}

static void combine_halves(char *target, const char *source, size_t count, int type, int op)
{
    for (size_t i = 0; i < count; i++) {
        uint16_t x, y, z;
        memcpy(&x, target + 2 * i, 2);
        memcpy(&y, source + 2 * i, 2);
        if (type == BFLOAT16)
            z = to_bfloat16(combine_floats(from_bfloat16(x), from_bfloat16(y), op));
        else
            z = to_float16(combine_floats(from_float16(x), from_float16(y), op));
        memcpy(target + 2 * i, &z, 2);
    }
}

static void combine(char *target, const char *source, size_t count, int type, int op)
{
    switch (type) {
    case INT8:
        COMBINE(int8_t, count) break;
    case UINT8:
        COMBINE(uint8_t, count) break;
    case INT32:
        COMBINE(int32_t, count) break;
    case UINT32:
        COMBINE(uint32_t, count) break;
    case INT64:
        COMBINE(int64_t, count) break;
    case UINT64:
        COMBINE(uint64_t, count) break;
    case FLOAT32:
        COMBINE(float, count) break;
    case FLOAT64:
        COMBINE(double, count) break;
    case FLOAT16:
    case BFLOAT16:
        combine_halves(target, source, count, type, op);
    }
}

#define DIVIDE(type)                                            \
    for (size_t i = 0; i < count; i++) {                        \
        type x;                                                 \
        memcpy(&x, target + i * sizeof x, sizeof x);            \
        x = (type)(x / (type)ranks);                            \
        memcpy(target + i * sizeof x, &x, sizeof x);            \
    }

/* An average is a sum divided at the end. */
static void divide(char *target, size_t count, int type, int ranks)
{
    switch (type) {
    case INT32:
        DIVIDE(int32_t) break;
    case INT64:
        DIVIDE(int64_t) break;
    case FLOAT32:
        DIVIDE(float) break;
    case FLOAT64:
        DIVIDE(double) break;
    case FLOAT16:
    case BFLOAT16:
        for (size_t i = 0; i < count; i++) {
            uint16_t x;
            memcpy(&x, target + 2 * i, 2);
            x = type == BFLOAT16 ? to_bfloat16(from_bfloat16(x) / (float)ranks)
                                 : to_float16(from_float16(x) / (float)ranks);
            memcpy(target + 2 * i, &x, 2);
        }
    }
}

static bool all_zero(const char *data, size_t bytes)
{
    return bytes == 0 || (data[0] == 0 && memcmp(data, data + 1, bytes - 1) == 0);
}

/* What `ranks` ranks that hold the same data make of it.  Max, min and average change nothing. */
static void reduce_alike(char *data, size_t count, int type, int op, int ranks)
{
    if ((op != OP_SUM && op != OP_PROD) || all_zero(data, bytes_of(count, type)))
        return;
    char *own = malloc(bytes_of(count, type));
    memcpy(own, data, bytes_of(count, type));
    for (int i = 1; i < ranks; i++)
        combine(data, own, count, type, op);
    free(own);
}

/* ---- buffers of communicators ----
 *
 * How many bytes they are is said by the settings (the sizes are measured, see tonnage's overheads.toml): those of a
 * communicator are taken at its first collective, those for direct messages at the first one to or from a peer. */

static int device_peers[MAX_DEVICES]; /* ranks for which buffers were taken, of all communicators on a device */

static int fail(int code, const char *text)
{
    snprintf(last_error, sizeof last_error, "%s", text);
    return code;
}

/* Of a communicator of so many ranks; of an unknown number as of three. */
static uint64_t communicator_bytes(int ranks)
{
    const struct config *s = config();
    int size = ranks ? ranks : 3;
    for (int i = 0; i < s->nccl_sizes; i++)
        if (size <= s->nccl[i].ranks)
            return s->nccl[i].bytes;
    return 0;
}

/* How many of so many new peers of a device need buffers. */
static int peers_to_take(int device, int peers)
{
    int room = config()->nccl_peers - device_peers[device];
    return peers < room ? peers : room > 0 ? room : 0;
}

/* As a real NCCL, which asks the driver and knows nothing of what torch's allocator could give back. */
static int take(int device, uint64_t bytes)
{
    if (bytes && !device_take(device, bytes))
        return fail(NCCL_UNHANDLED_CUDA_ERROR, "Cuda failure 2 'out of memory'");
    return NCCL_SUCCESS;
}

/* Notes that a rank exchanges with another directly; whether it is the first time.  Between two ranks the
 * communicator's own buffers serve. */
static bool meet(struct ncclComm *c, int other)
{
    if (c->ranks <= 2 || other < 0 || other >= c->ranks || other == c->rank)
        return false;
    if (!c->met)
        c->met = calloc((size_t)c->ranks, sizeof *c->met);
    bool first = !c->met[other];
    c->met[other] = true;
    return first;
}

/* Takes what `peers` new peers, and the communicator itself if it is new, need of its card. */
static int take_buffers(struct ncclComm *c, int peers)
{
    int more = peers_to_take(c->device, peers);
    uint64_t bytes = (uint64_t)more * config()->nccl_peer_bytes + (c->connected ? 0 : communicator_bytes(c->ranks));
    int error = take(c->device, bytes);
    if (error)
        return error;
    c->connected = true;
    c->taken += bytes;
    c->peers += more;
    device_peers[c->device] += more;
    return NCCL_SUCCESS;
}

static void give_buffers(struct ncclComm *c)
{
    device_give(c->device, c->taken);
    device_peers[c->device] -= c->peers;
    free(c->met);
}

/* What a communicator of so many ranks (0: none) and so many new peers take of the current device: for steps that
 * are made again without their exchanges. */
API int ghost_nccl_take(int ranks, int peers)
{
    int more = peers_to_take(current_device, peers);
    uint64_t bytes = (uint64_t)more * config()->nccl_peer_bytes + (ranks ? communicator_bytes(ranks) : 0);
    device_peers[current_device] += more;
    return take(current_device, bytes);
}

/* ---- communicators ---- */

static uint64_t key_of(const void *data, size_t bytes)
{
    uint64_t key = 14695981039346656037ull;
    for (size_t i = 0; i < bytes; i++)
        key = (key ^ ((const unsigned char *)data)[i]) * 1099511628211ull;
    return key;
}

/* How many processes are real ranks: the setting, or torchrun's word that it started them. */
static int real_ranks(void)
{
    const char *local = getenv("LOCAL_WORLD_SIZE");
    if (!getenv("GHOST_REAL_RANKS") && config()->real_ranks == 1 && getenv("TORCHELASTIC_RUN_ID") && local)
        return atoi(local);
    return config()->real_ranks;
}

static const char NOT_JOINED[] =
    "the other ranks did not join, or /dev/shm cannot be used; see the ghost's message on stderr";

/* NCCL takes one rank a card, from 2.30 on several if told so.  The number is the card's place on the bus, in NCCL's
 * own words. */
static int refuse_sharing(const struct ncclComm *c)
{
    int card = device_physical(c->device);
    const char *several = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    if (several && strcmp(several, "1") == 0)
        return NCCL_SUCCESS;
    if (!meeting_exchange(c->meeting, &card, sizeof card, "the communicator's start"))
        return fail(NCCL_SYSTEM_ERROR, NOT_JOINED);
    for (int i = 0; i < c->ranks; i++) {
        if (i == c->rank || *(const int *)meeting_given(c->meeting, i) != card)
            continue;
        char text[128];
        snprintf(text, sizeof text, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x", c->rank, i,
                 (unsigned)(card + 1) << 12);
        return fail(NCCL_INVALID_USAGE, text);
    }
    return NCCL_SUCCESS;
}

static int start(ncclComm_t *result, int ranks, int rank, uint64_t key, bool emulated)
{
    *result = NULL;
    if (ranks < 0 || rank < 0 || (ranks && rank >= ranks))
        return fail(NCCL_INVALID_ARGUMENT, "rank outside the communicator");
    device_use(current_device);
    struct ncclComm *c = calloc(1, sizeof *c);
    *c = (struct ncclComm){.ranks = ranks, .rank = rank, .device = current_device, .key = key};
    c->id = __atomic_add_fetch(&communicator_count, 1, __ATOMIC_RELAXED);
    if (!emulated && ranks > 1 && ranks <= real_ranks()) {
        c->meeting = meeting_join(key, rank, ranks);
        if (!c->meeting) {
            free(c);
            return fail(NCCL_SYSTEM_ERROR, NOT_JOINED);
        }
        int refused = refuse_sharing(c);
        if (refused != NCCL_SUCCESS) {
            meeting_leave(c->meeting);
            free(c);
            return refused;
        }
    }
    *result = c;
    return NCCL_SUCCESS;
}

API int ncclGetVersion(int *version)
{
    *version = NCCL_VERSION;
    return NCCL_SUCCESS;
}

API int ncclGetUniqueId(ncclUniqueId *id)
{
    static uint32_t count;
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "ghost %d %lld.%09ld %u", getpid(), (long long)time.tv_sec,
             time.tv_nsec, __atomic_add_fetch(&count, 1, __ATOMIC_RELAXED));
    return NCCL_SUCCESS;
}

API int ncclCommInitRankConfig(ncclComm_t *c, int ranks, ncclUniqueId id, int rank, void *options)
{
    return start(c, ranks, rank, key_of(&id, sizeof id), false);
}

API int ncclCommInitRank(ncclComm_t *c, int ranks, ncclUniqueId id, int rank)
{
    return start(c, ranks, rank, key_of(&id, sizeof id), false);
}

API int ncclCommInitRankScalable(ncclComm_t *c, int ranks, int rank, int id_count, ncclUniqueId *ids, void *options)
{
    return start(c, ranks, rank, key_of(ids, sizeof *ids * (size_t)id_count), false);
}

/* All ranks in this process, one a device. */
API int ncclCommInitAll(ncclComm_t *list, int count, const int *devices)
{
    int before = current_device;
    for (int i = 0; i < count; i++) {
        current_device = devices ? devices[i] : i;
        int error = start(&list[i], count, i, 0, true);
        if (error)
            return error;
    }
    current_device = before;
    return NCCL_SUCCESS;
}

/* ---- parts of a communicator ---- */

static int told_ranks;

/* The size of the part that the next split of an emulated communicator makes; nothing else tells us. */
API void ghost_nccl_next_split(int ranks)
{
    told_ranks = ranks;
}

struct split {
    int color, key, rank;
};

/* This rank's place among those of its colour, by key and then by rank. */
static int place(ncclComm_t c, struct split mine, int *members)
{
    int before = 0;
    *members = 0;
    for (int i = 0; i < c->ranks; i++) {
        const struct split *other = meeting_given(c->meeting, i);
        if (other->color != mine.color)
            continue;
        *members += 1;
        before += other->key < mine.key || (other->key == mine.key && i < mine.rank);
    }
    return before;
}

API int ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t *result, void *options)
{
    struct split mine = {color, key, c->rank};
    struct {
        uint64_t parent;
        uint32_t number;
        int color;
    } name = {c->key, ++c->splits, color};
    int ranks = told_ranks, rank = key;
    *result = NULL;
    told_ranks = 0;
    if (c->meeting) {
        if (!meeting_exchange(c->meeting, &mine, sizeof mine, "CommSplit"))
            return fail(NCCL_REMOTE_ERROR, "a rank did not come to ncclCommSplit");
        rank = place(c, mine, &ranks);
    }
    if (color < 0)
        return NCCL_SUCCESS;
    if (!c->meeting && !ranks && c->ranks == 1)
        ranks = 1;
    return start(result, ranks, rank, key_of(&name, sizeof name), !c->meeting);
}

API int ncclCommShrink(ncclComm_t c, int *excluded, int count, ncclComm_t *result, void *options, int flags)
{
    int before = 0;
    for (int i = 0; i < count; i++)
        before += excluded[i] < c->rank;
    uint64_t key = key_of(&(uint64_t[]){c->key, ++c->splits}, 16);
    return start(result, c->ranks - count, c->rank - before, key, !c->meeting);
}

static int end(ncclComm_t c)
{
    if (!c)
        return NCCL_SUCCESS;
    if (c->meeting)
        meeting_leave(c->meeting);
    give_buffers(c);
    free(c);
    return NCCL_SUCCESS;
}

API int ncclCommDestroy(ncclComm_t c)
{
    return end(c);
}

API int ncclCommAbort(ncclComm_t c)
{
    return end(c);
}

API int ncclCommFinalize(ncclComm_t c)
{
    return NCCL_SUCCESS;
}

API int ncclCommCount(const struct ncclComm *c, int *ranks)
{
    *ranks = c->ranks;
    return NCCL_SUCCESS;
}

API int ncclCommUserRank(const struct ncclComm *c, int *rank)
{
    *rank = c->rank;
    return NCCL_SUCCESS;
}

API int ncclCommCuDevice(const struct ncclComm *c, int *device)
{
    *device = c->device;
    return NCCL_SUCCESS;
}

API int ncclCommGetAsyncError(ncclComm_t c, int *error)
{
    *error = NCCL_SUCCESS;
    return NCCL_SUCCESS;
}

API const char *ncclGetErrorString(int error)
{
    static const char *const texts[] = {
        "no error",         "unhandled cuda error",  "unhandled system error", "internal error",
        "invalid argument", "invalid usage",         "remote process exited or there was a network error",
        "NCCL operation in progress",
    };
    return error >= 0 && error < 8 ? texts[error] : "unknown result code";
}

API const char *ncclGetLastError(ncclComm_t c)
{
    return last_error;
}

/* ---- buffers and operators of the user ---- */

API int ncclMemAlloc(void **pointer, size_t bytes)
{
    return memory_allocate(pointer, bytes, current_device) == SUCCESS ? NCCL_SUCCESS : 1;
}

API int ncclMemFree(void *pointer)
{
    return memory_free(pointer) == SUCCESS ? NCCL_SUCCESS : 1;
}

API int ncclCommRegister(ncclComm_t c, void *buffer, size_t bytes, void **handle)
{
    *handle = buffer;
    return NCCL_SUCCESS;
}

API int ncclCommDeregister(ncclComm_t c, void *handle)
{
    return NCCL_SUCCESS;
}

API int ncclCommWindowRegister(ncclComm_t c, void *buffer, size_t bytes, void **window, int flags)
{
    *window = buffer;
    return NCCL_SUCCESS;
}

API int ncclCommWindowDeregister(ncclComm_t c, void *window)
{
    return NCCL_SUCCESS;
}

API int ncclWinGetUserPtr(ncclComm_t c, void *window, void **pointer)
{
    *pointer = window;
    return NCCL_SUCCESS;
}

API int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, ncclComm_t c)
{
    *op = 5 + OP_SUM; /* counted as a sum; its scalar is applied by nobody */
    return NCCL_SUCCESS;
}

API int ncclRedOpDestroy(int op, ncclComm_t c)
{
    return NCCL_SUCCESS;
}

API int ncclCommMemStats(ncclComm_t c, int which, uint64_t *value)
{
    *value = 0;
    return NCCL_SUCCESS;
}

/* ---- operations ---- */

enum kind { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, SEND, RECV };

static const char *const kind_names[] = {
    "AllReduce", "Reduce", "Broadcast", "AllGather", "ReduceScatter", "AllToAll", "Gather", "Scatter", "Send", "Recv",
};

/* One operation; `count` is what this rank gives, or gets where that is less (reduce-scatter, receive). */
struct collective {
    enum kind kind;
    const void *send;
    void *receive;
    size_t count;
    int type, op, peer; /* peer: root, or the other side of a message */
    ncclComm_t communicator;
    cudaStream_t stream;
};

static void record(const struct collective *c)
{
    size_t bytes = bytes_of(c->count, c->type);
    struct operation work = {.record = {
                                 .kind = RECORD_COLLECTIVE,
                                 .flags = (uint16_t)c->type,
                                 .name = name_id(kind_names[c->kind]),
                                 .grid_x = (uint32_t)c->communicator->ranks,
                                 .grid_y = c->communicator->id,
                                 .grid_z = (uint32_t)c->communicator->rank,
                                 .block = (uint32_t)c->peer,
                                 .shared = (uint32_t)c->op,
                                 .bytes = bytes,
                                 .address = (uint64_t)c->send,
                                 .address2 = (uint64_t)c->receive,
                             }};
    submit(c->stream, &work);
}

/* Bytes that this rank gives and gets. */
static size_t given_bytes(const struct collective *c)
{
    size_t bytes = bytes_of(c->count, c->type), ranks = (size_t)c->communicator->ranks;
    return c->kind == REDUCE_SCATTER || c->kind == ALL_TO_ALL || c->kind == SCATTER ? bytes * ranks : bytes;
}

static size_t gotten_bytes(const struct collective *c)
{
    size_t bytes = bytes_of(c->count, c->type), ranks = (size_t)c->communicator->ranks;
    return c->kind == ALL_GATHER || c->kind == ALL_TO_ALL || c->kind == GATHER ? bytes * ranks : bytes;
}

/* The data that rank `i` gave. */
static const char *given(const struct collective *c, const char *own, int i)
{
    return c->communicator->meeting ? meeting_given(c->communicator->meeting, i) : own;
}

/* Reduces part [offset, offset + count) of what all gave, into `result`. */
static void reduce(const struct collective *c, const char *own, size_t offset, char *result)
{
    int ranks = c->communicator->ranks, op = c->op > OP_AVG ? OP_SUM : c->op;
    size_t bytes = bytes_of(c->count, c->type);
    memcpy(result, given(c, own, 0) + offset, bytes);
    if (!c->communicator->meeting) {
        reduce_alike(result, c->count, c->type, op, ranks);
        return;
    }
    for (int i = 1; i < ranks; i++)
        combine(result, given(c, own, i) + offset, c->count, c->type, op == OP_AVG ? OP_SUM : op);
    if (op == OP_AVG)
        divide(result, c->count, c->type, ranks);
}

/* What this rank gets, from what all gave. */
static void resolve(const struct collective *c, const char *own, char *result)
{
    size_t bytes = bytes_of(c->count, c->type);
    int rank = c->communicator->rank, ranks = c->communicator->ranks;
    switch (c->kind) {
    case ALL_REDUCE:
    case REDUCE:
        reduce(c, own, 0, result);
        break;
    case REDUCE_SCATTER:
        reduce(c, own, bytes * (size_t)rank, result);
        break;
    case BROADCAST:
        memcpy(result, given(c, own, c->peer), bytes);
        break;
    case ALL_GATHER:
    case GATHER:
        for (int i = 0; i < ranks; i++)
            memcpy(result + bytes * (size_t)i, given(c, own, i), bytes);
        break;
    case ALL_TO_ALL:
        for (int i = 0; i < ranks; i++)
            memcpy(result + bytes * (size_t)i, given(c, own, i) + bytes * (size_t)rank, bytes);
        break;
    case SCATTER:
        memcpy(result, given(c, own, c->peer) + bytes * (size_t)rank, bytes);
        break;
    default:
        break;
    }
}

static bool receives(const struct collective *c)
{
    bool one = c->kind == REDUCE || c->kind == GATHER;
    return !one || c->communicator->rank == c->peer;
}

static bool gives(const struct collective *c)
{
    bool one = c->kind == SCATTER || c->kind == BROADCAST;
    return !one || c->communicator->rank == c->peer || !c->communicator->meeting;
}

static int no_values(const struct collective *c, size_t bytes)
{
    if (receives(c) && is_device_address(c->receive))
        values_forget((uint64_t)c->receive, bytes);
    return NCCL_SUCCESS;
}

static int exchange(const struct collective *c)
{
    size_t give = given_bytes(c), get = gotten_bytes(c);
    if (give > EXCHANGE_BYTES || c->communicator->ranks == 0)
        return no_values(c, get);
    char *own = calloc(1, give + 1);
    int error = NCCL_SUCCESS;
    if (gives(c) && c->send)
        values_copy(own, c->send, give);
    if (!c->communicator->meeting && all_zero(own, give)) {
        free(own);
        return no_values(c, get);
    }
    char *result = malloc(get + 1);
    if (c->communicator->meeting && !meeting_exchange(c->communicator->meeting, own, give, kind_names[c->kind]))
        error = fail(NCCL_REMOTE_ERROR, "a rank did not come to a collective; see the ghost's message on stderr");
    if (!error && receives(c)) {
        resolve(c, own, result);
        for (size_t at = 0; at < get; at += EXCHANGE_BYTES) /* larger copies would carry no values */
            values_copy((char *)c->receive + at, result + at, get - at < EXCHANGE_BYTES ? get - at : EXCHANGE_BYTES);
    }
    free(own);
    free(result);
    return error;
}

static int message(const struct collective *c)
{
    size_t bytes = bytes_of(c->count, c->type);
    struct meeting *meeting = c->communicator->meeting;
    bool small = meeting && bytes <= EXCHANGE_BYTES;
    if (c->kind == RECV && !small)
        values_forget((uint64_t)c->receive, bytes);
    if (!small)
        return NCCL_SUCCESS;
    char *data = malloc(bytes + 1);
    bool done;
    if (c->kind == SEND) {
        values_copy(data, c->send, bytes);
        done = meeting_send(meeting, c->peer, data, bytes);
    } else {
        done = meeting_receive(meeting, c->peer, data, bytes);
        if (done)
            values_copy(c->receive, data, bytes);
    }
    free(data);
    return done ? NCCL_SUCCESS : fail(NCCL_REMOTE_ERROR, "a message did not arrive; see the ghost's message on stderr");
}

static int carry_out(const struct collective *c)
{
    if (c->communicator->meeting && capture_active(stream_of(c->stream)))
        return NCCL_SUCCESS; /* a captured collective has no values */
    return c->kind == SEND || c->kind == RECV ? message(c) : exchange(c);
}

/* ---- groups: what is between start and end happens together, receives after sends ---- */

static __thread struct {
    int depth;
    size_t count, capacity;
    struct collective *waiting;
    int error; /* of what could not be begun: the group's end tells it */
} group;

/* Before the first of several that happen together. */
static int prepare(const struct collective *c)
{
    int peers = 0;
    if (c->kind == SEND || c->kind == RECV)
        peers = meet(c->communicator, c->peer);
    for (int i = 0; c->kind == ALL_TO_ALL && i < c->communicator->ranks; i++)
        peers += meet(c->communicator, i);
    return peers || !c->communicator->connected ? take_buffers(c->communicator, peers) : NCCL_SUCCESS;
}

static int enter(struct collective c)
{
    if (!c.communicator)
        return NCCL_INVALID_ARGUMENT;
    int error = prepare(&c);
    if (error && group.depth) {
        group.error = error;
        return NCCL_SUCCESS;
    }
    if (error)
        return error;
    record(&c);
    if (!group.depth)
        return carry_out(&c);
    if (group.count == group.capacity) {
        group.capacity = group.capacity ? 2 * group.capacity : 64;
        group.waiting = realloc(group.waiting, group.capacity * sizeof *group.waiting);
    }
    group.waiting[group.count++] = c;
    return NCCL_SUCCESS;
}

/* Where a group holds a broadcast from every rank, in their order (torch 2.15 gathers a list of tensors so), the
 * emulated ranks give what this rank gives in it. */
static void give_alike(void)
{
    for (size_t i = 0; i < group.count; i++) {
        struct collective *c = &group.waiting[i];
        if (c->kind != BROADCAST || c->communicator->meeting)
            continue;
        size_t own = i + (size_t)c->communicator->rank - (size_t)c->peer; /* out of range where it is negative */
        const struct collective *mine = own < group.count ? &group.waiting[own] : c;
        if (mine->kind == BROADCAST && mine->communicator == c->communicator && mine->peer == c->communicator->rank &&
            mine->count == c->count && mine->type == c->type)
            c->send = mine->send;
    }
}

API int ncclGroupStart(void)
{
    group.depth++;
    return NCCL_SUCCESS;
}

API int ncclGroupEnd(void)
{
    int error = group.error;
    if (group.depth == 0)
        return 5; /* invalid usage */
    if (--group.depth)
        return NCCL_SUCCESS;
    group.error = NCCL_SUCCESS;
    give_alike();
    for (int pass = 0; pass < 3; pass++)
        for (size_t i = 0; i < group.count && !error; i++) {
            enum kind kind = group.waiting[i].kind;
            if (pass == (kind == SEND ? 0 : kind == RECV ? 2 : 1))
                error = carry_out(&group.waiting[i]);
        }
    group.count = 0;
    return error;
}

API int ncclGroupSimulateEnd(void *info)
{
    return ncclGroupEnd();
}

API int ncclAllReduce(const void *send, void *receive, size_t count, int type, int op, ncclComm_t c, cudaStream_t stream)
{
    return enter((struct collective){ALL_REDUCE, send, receive, count, type, op, 0, c, stream});
}

API int ncclReduce(const void *send, void *receive, size_t count, int type, int op, int root, ncclComm_t c,
                   cudaStream_t stream)
{
    return enter((struct collective){REDUCE, send, receive, count, type, op, root, c, stream});
}

API int ncclBroadcast(const void *send, void *receive, size_t count, int type, int root, ncclComm_t c,
                      cudaStream_t stream)
{
    return enter((struct collective){BROADCAST, send, receive, count, type, 0, root, c, stream});
}

API int ncclBcast(void *buffer, size_t count, int type, int root, ncclComm_t c, cudaStream_t stream)
{
    return ncclBroadcast(buffer, buffer, count, type, root, c, stream);
}

API int ncclAllGather(const void *send, void *receive, size_t count, int type, ncclComm_t c, cudaStream_t stream)
{
    return enter((struct collective){ALL_GATHER, send, receive, count, type, 0, 0, c, stream});
}

API int ncclReduceScatter(const void *send, void *receive, size_t count, int type, int op, ncclComm_t c,
                          cudaStream_t stream)
{
    return enter((struct collective){REDUCE_SCATTER, send, receive, count, type, op, 0, c, stream});
}

API int ncclAlltoAll(const void *send, void *receive, size_t count, int type, ncclComm_t c, cudaStream_t stream)
{
    return enter((struct collective){ALL_TO_ALL, send, receive, count, type, 0, 0, c, stream});
}

API int ncclGather(const void *send, void *receive, size_t count, int type, int root, ncclComm_t c,
                   cudaStream_t stream)
{
    return enter((struct collective){GATHER, send, receive, count, type, 0, root, c, stream});
}

API int ncclScatter(const void *send, void *receive, size_t count, int type, int root, ncclComm_t c,
                    cudaStream_t stream)
{
    return enter((struct collective){SCATTER, send, receive, count, type, 0, root, c, stream});
}

API int ncclSend(const void *send, size_t count, int type, int peer, ncclComm_t c, cudaStream_t stream)
{
    return enter((struct collective){SEND, send, NULL, count, type, 0, peer, c, stream});
}

API int ncclRecv(void *receive, size_t count, int type, int peer, ncclComm_t c, cudaStream_t stream)
{
    return enter((struct collective){RECV, NULL, receive, count, type, 0, peer, c, stream});
}
