/* The ghost GPU's own declarations.
 *
 * A ghost GPU answers the calls of the CUDA runtime, the driver, and NVIDIA's libraries without a GPU:
 * device memory is bookkeeping with a capacity, kernels do nothing, work is written to a log.  Everything
 * with state lives in libghost.so, one file per noun; `docs/explanation/ghost.md` describes the behaviour.
 *
 * Functions marked API carry the public name of the library they stand in for.  No NVIDIA header is used:
 * cuda12.h and cuda13.h hold the structures whose layout an application sees.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))
#define MIB (1024ull * 1024)
#define GIB (1024 * MIB)
#define GRANULE (2 * MIB) /* in which the driver hands out device memory */
#define MAX_DEVICES 64

#if GHOST_CUDA == 12
#include "cuda12.h"
#else
#include "cuda13.h"
#endif

/* ---- errors ------------------------------------------------------------------------------------- */

typedef int cudaError_t; /* the runtime's and the driver's codes agree for all codes used here */
typedef int CUresult;

enum {
    SUCCESS = 0,
    ERROR_INVALID_VALUE = 1,
    ERROR_OUT_OF_MEMORY = 2,
    ERROR_NO_DEVICE = 100,
    ERROR_INVALID_DEVICE = 101,
    ERROR_PEER_ALREADY_ENABLED = 704,
    ERROR_HOST_ALREADY_REGISTERED = 712,
    ERROR_HOST_NOT_REGISTERED = 713,
    ERROR_FILE_NOT_FOUND = 301,
    ERROR_INVALID_HANDLE = 400,
    ERROR_ILLEGAL_STATE = 401,
    ERROR_NOT_FOUND = 500,
    ERROR_NOT_READY = 600,
    ERROR_NOT_SUPPORTED = 801,
    ERROR_CAPTURE_UNSUPPORTED = 900,
    ERROR_CAPTURE_INVALIDATED = 901,
    ERROR_CAPTURE_UNMATCHED = 903,
    ERROR_CAPTURED_EVENT = 907,
};

/* Remembers `code` as this thread's last runtime error when it is one, and returns it. */
cudaError_t runtime_result(cudaError_t code);
const char *error_name(int code);
const char *error_text(int code);

/* ---- settings (config.c) ------------------------------------------------------------------------ */

#define MAX_NCCL_SIZES 8

struct config {
    int devices;             /* cards in the machine */
    uint64_t total_bytes;    /* of each device, as the driver reports it */
    uint64_t context_bytes;  /* taken by the first use of a device */
    uint64_t reserved_bytes; /* of each device, on top of total_bytes, seen by NVML only */
    char name[256];
    int major, minor; /* compute capability */
    int multiprocessors;
    int threads_per_multiprocessor;
    int l2_bytes;
    int shared_per_block_bytes; /* with opt-in */
    int shared_per_multiprocessor_bytes;
    int registers_per_multiprocessor;
    int bus_bits;
    int memory_khz;
    int clock_khz;
    bool lazy_events; /* events complete only when somebody waits for them */
    bool immediate_events; /* or at once, even if nothing was launched since */
    bool log;
    struct {
        int ranks;      /* of a communicator of at most so many */
        uint64_t bytes; /* buffers take so much of each rank's card */
    } nccl[MAX_NCCL_SIZES];
    int nccl_sizes;
    uint64_t nccl_peer_bytes; /* buffers for direct messages to and from another rank */
    int nccl_peers;           /* for at most so many of them */
    uint64_t graph_bytes;     /* taken by each executable graph, beside what its work allocates */
    int real_ranks; /* processes that share NCCL communicators; 1: every other rank is emulated */
    int timeout_seconds;
    char report[1024];
    char shm[128];
    char cards[1024]; /* file of the account that processes share; "": none */
};

const struct config *config(void);

/* ---- ordered ranges of addresses (ranges.c) ----------------------------------------------------- */

struct range {
    uint64_t start, bytes;
    struct range *left, *right;
    uint32_t priority;
};

void range_insert(struct range **root, struct range *range);
void range_remove(struct range **root, struct range *range);
struct range *range_floor(struct range *root, uint64_t address);   /* last range with start <= address */
struct range *range_ceiling(struct range *root, uint64_t address); /* first range with start >= address */
struct range *range_holding(struct range *root, uint64_t address); /* the range that contains it */

/* ---- hash table from pointers or numbers to pointers (table.c) ---------------------------------- */

struct table {
    struct slot {
        uint64_t key;
        void *value;
    } *slots;
    size_t used, capacity;
};

void *table_get(const struct table *table, uint64_t key);
void table_put(struct table *table, uint64_t key, void *value);

/* ---- device addresses (space.c) ----------------------------------------------------------------- */

uint64_t space_take(uint64_t bytes); /* for a block of cudaMalloc, as the driver places it; 0: no room */
uint64_t space_reserve(uint64_t bytes, uint64_t alignment); /* a range to map memory into; 0: no room */
void space_give(uint64_t address, uint64_t bytes);
bool is_device_address(const void *pointer);

/* ---- devices (device.c) ------------------------------------------------------------------------- */

extern __thread int current_device;

int device_count(void);                /* cards that CUDA_VISIBLE_DEVICES leaves */
int device_physical(int device);       /* a device's number among all cards */
int device_of_physical(int physical);  /* the device that a card is, -1 if it is not visible */
int device_process(void);              /* the process that first used a device, 0 if none did */

cudaError_t device_use(int device); /* first use of a device by the process: its context takes memory */
void devices_changed(void);         /* the number of cards was set anew */
bool device_active(int device);
bool device_any_active(void);
bool device_take(int device, uint64_t bytes); /* false: does not fit */
void device_give(int device, uint64_t bytes);
uint64_t device_free_bytes(int device);
int device_attribute(int attribute, int device);
int blocks_per_multiprocessor(void);
void card_uuid(int card, unsigned char bytes[16]);
void card_uuid_text(int card, char text[48]);

/* ---- what is taken of the machine's cards, by their number among all (cards.c) -------------------- */

struct card_process {
    int process;
    uint64_t bytes;
};

bool card_take(int card, uint64_t bytes); /* false: the processes together have not so much left */
void card_give(int card, uint64_t bytes);
uint64_t card_used(int card); /* by all processes */
uint64_t card_used_here(int card);
uint64_t card_peak_here(int card);
int card_processes(int card, struct card_process *list, int room); /* how many hold something; at most `room` are told */
bool process_ended(int process); /* also when only its exit code is left */

/* ---- the log (log.c) ---------------------------------------------------------------------------- */

enum record_kind {
    RECORD_KERNEL = 1,           /* name, grid, block (threads), shared */
    RECORD_COPY_H2D = 2,         /* copies: bytes, address (target), address2 (source) */
    RECORD_COPY_D2H = 3,
    RECORD_COPY_D2D = 4,         /* between devices also grid_x, grid_y = target, source + 1 */
    RECORD_MEMSET = 5,           /* bytes, address */
    RECORD_MALLOC = 6,           /* address, bytes requested; so are the next five */
    RECORD_FREE = 7,
    RECORD_VM_MAP = 8,
    RECORD_VM_UNMAP = 9,
    RECORD_PINNED_ALLOC = 10,
    RECORD_PINNED_FREE = 11,
    RECORD_COLLECTIVE = 12,      /* see below */
    RECORD_LIBRARY = 13,         /* name; matrix products: grid = m, n, k, block = batch, flags = type */
    RECORD_EVENT = 14,           /* address (event); so is a stream's wait for it */
    RECORD_WAIT = 15,
    RECORD_SYNCHRONISE = 16,     /* stream; flags 1: device, 2: event */
    RECORD_GRAPH_LAUNCH = 17,    /* grid_x = nodes, which follow */
    RECORD_HOST_CALL = 18,
};

/* A collective's record has name, flags (type), bytes given by this rank (reduce-scatter and receive: taken), grid =
   ranks, communicator, rank; block = root or peer; shared = operator; address, address2 = send, receive. */

#define RECORD_REPLAYED 0x8000 /* flag: this work was replayed by a graph launch */

/* The layout of one record of the log.  Its copy in Python is recorder/tonnage_recorder/record_layout.py; a test compares
   the two. */
struct ghost_record {
    uint8_t kind, device;
    uint16_t flags;
    uint32_t mark, name;
    uint32_t grid_x, grid_y, grid_z;
    uint32_t block, shared;
    uint64_t stream, bytes, address, address2;
};

uint32_t name_id(const char *name); /* equal texts have equal ids; id 0 is "" */
extern uint32_t ghost_current_mark; /* what records carry from now on; a program that is watched sets it */
size_t ghost_log_count(void);
void log_append(struct ghost_record record);
void log_memory(enum record_kind kind, int device, uint64_t address, uint64_t bytes);

/* ---- streams, events and what they carry (stream.c, event.c, graph.c) --------------------------- */

typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
typedef struct CUgraph_st *cudaGraph_t;
typedef struct CUgraphExec_st *cudaGraphExec_t;
typedef struct CUgraphNode_st *cudaGraphNode_t;

struct capture;

struct CUstream_st {
    int device, priority;
    unsigned flags;
    uint64_t id;
    uint64_t submitted, completed; /* positions; they differ only with lazy events */
    struct wait *waits;            /* what this stream waits for on other streams, newest first */
    struct capture *capture;       /* while it captures */
};

/* One piece of work in a stream: its record and what is really done for it. */
struct operation {
    struct ghost_record record;
    enum { DO_NOTHING, DO_COPY, DO_FILL, DO_CALL } action;
    void *target;
    const void *source;
    size_t width, height, target_pitch, source_pitch; /* copy: `height` rows of `width` bytes */
    int value, value_bytes;                           /* fill */
    void (*call)(void *);                             /* host function, with `target` as its argument */
};

struct CUstream_st *stream_of(cudaStream_t handle); /* the stream behind a handle, default ones included */
void submit(cudaStream_t stream, const struct operation *operation);
void perform(const struct operation *operation);
bool stream_done(const struct CUstream_st *stream, uint64_t position);
void stream_wait(struct CUstream_st *stream);
cudaError_t stream_synchronise(cudaStream_t stream);
void device_synchronise(int device);

cudaError_t capture_check(cudaStream_t stream); /* error if the stream is capturing: the capture breaks */
bool capture_active(const struct CUstream_st *stream);
void capture_add(struct CUstream_st *stream, const struct operation *operation);
uint64_t capture_id(const struct CUstream_st *stream);
void capture_join(struct CUstream_st *stream, struct capture *capture);

/* ---- values (values.c) -------------------------------------------------------------------------- */

#define VALUES_COPY_BYTES MIB /* larger copies carry no values */

void values_copy(void *target, const void *source, size_t bytes);
void values_fill(void *target, int value, int value_bytes, size_t bytes);
void values_forget(uint64_t address, uint64_t bytes);
bool values_known(uint64_t address, uint64_t bytes);

/* ---- kernels (launch.c) ------------------------------------------------------------------------- */

struct dim3 {
    unsigned x, y, z;
};

struct function {
    const char *text;
    struct module *module;
    uint32_t name; /* 0 until first used */
    int max_dynamic_shared_bytes;
    int preferred_carveout;
};

void cubin_registers(const void *image, void (*found)(void *context, const char *kernel, int registers), void *context);
void cubin_kernels(const void *image, void (*found)(void *context, const char *kernel), void *context);
struct module *module_new(const void *image);
struct module *module_from_file(const char *path); /* NULL: it cannot be read */
unsigned module_kernels(struct module *module, struct function **kernels, unsigned room); /* of machine code: how many */
struct function *module_function(struct module *module, const char *name);
void function_attributes(const struct function *function, struct cudaFuncAttributes *attributes);
struct function *function_of(const void *handle); /* NULL if unknown */
int occupancy(int block_threads, size_t dynamic_shared_bytes);
void launch(struct function *function, struct dim3 grid, struct dim3 block, size_t shared_bytes, cudaStream_t stream);
void library_call(const char *name, int dtype, int m, int n, int k, int batch, cudaStream_t stream);

/* ---- memory (memory.c) -------------------------------------------------------------------------- */

cudaError_t memory_allocate(void **pointer, size_t bytes, int device);
cudaError_t memory_free(void *pointer);
cudaError_t memory_pin(void **pointer, size_t bytes);
cudaError_t memory_manage(void **pointer, size_t bytes);
cudaError_t memory_range(uint64_t pointer, uint64_t *start, uint64_t *bytes, int *device);
int vm_device(uint64_t address); /* the device whose memory is mapped there, or -1 */
uint64_t ghost_pinned_bytes(void);
uint64_t ghost_pinned_peak_bytes(void);
uint64_t ghost_managed_bytes(void);
uint64_t ghost_managed_peak_bytes(void);
uint64_t ghost_device_used(int device);
uint64_t ghost_device_peak(int device);
uint64_t ghost_launches(void);

/* ---- what was not modelled (unknown.c) ---------------------------------------------------------- */

/* Counts the calls of a library whose true workspace nobody outside it knows; we answered 0 bytes. */
void unknown_workspace(const char *name);
void *spare_stub(const char *name); /* a counted function that returns success, one per name */
void *driver_symbol(const char *name, int version); /* entry point of that name, or a spare stub */
void *dummy_handle(void);                           /* a fresh handle: never NULL, never twice the same */

/* Stores into a caller's variable, unless the pointer is null or on the device. */
void ghost_store4(void *pointer, uint32_t value);
void ghost_store8(void *pointer, uint64_t value);
