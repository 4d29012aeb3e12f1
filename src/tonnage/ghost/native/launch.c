/* Kernels: modules and their architectures, functions and their attributes, occupancy, launches. */
#define _GNU_SOURCE
#include "ghost.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What a kernel needs is in its machine code.  Of kernels that are compiled at run time we read the registers
 * (cubin.c); the others, whose code is compressed, are taken to use so many a thread, and none static shared memory. */
#define REGISTERS_PER_THREAD 32

/* Code for the card, as nvcc packs it: a wrapper in the program points at a header, followed by entries of
 * machine code (for one architecture) and PTX (for that architecture and later ones). */
#define WRAPPER_MAGIC 0x466243b1u
#define FATBIN_MAGIC 0xba55ed50u
enum { ENTRY_PTX = 1, ENTRY_ELF = 2 };

struct fatbin_wrapper {
    uint32_t magic, version;
    const void *data;
    void *unused;
};

struct fatbin_header {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes; /* of all entries */
};

struct fatbin_entry {
    uint16_t kind, unknown;
    uint32_t header_bytes;
    uint64_t bytes;
    uint32_t compressed_bytes, unknown2;
    uint16_t minor, major;
    uint32_t architecture; /* 90 for compute capability 9.0 */
};

struct module {
    const struct fatbin_header *code; /* NULL: not in a form we know */
    int binary_version, ptx_version;  /* of the code this card would run; 0 until looked at */
    struct table functions;           /* by hash of the name, for modules loaded at run time */
    struct table registers;           /* by the same: of a thread, where the code says it */
    struct function **kernels;        /* that the code names, in its order */
    unsigned kernel_count;
};

struct variable {
    const char *name;
    uint64_t bytes, address; /* address 0 until asked for */
};

static struct table functions; /* host stub or handle -> struct function */
static struct table variables; /* host variable -> struct variable */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- modules ---- */

static uint64_t name_key(const char *name)
{
    uint64_t key = 1469598103934665603ull;
    for (const char *c = name; *c; c++)
        key = (key ^ (unsigned char)*c) * 1099511628211ull;
    return key;
}

static void note_registers(void *module, const char *kernel, int registers)
{
    table_put(&((struct module *)module)->registers, name_key(kernel), (void *)(intptr_t)registers);
}

static void note_kernel(void *context, const char *name)
{
    struct module *module = context;
    module->kernels = realloc(module->kernels, (module->kernel_count + 1) * sizeof *module->kernels);
    module->kernels[module->kernel_count++] = module_function(module, name);
}

struct module *module_new(const void *image)
{
    struct module *module = calloc(1, sizeof *module);
    const struct fatbin_wrapper *wrapper = image;
    const struct fatbin_header *header = image;
    if (image && wrapper->magic == WRAPPER_MAGIC)
        header = wrapper->data;
    if (header && header->magic == FATBIN_MAGIC)
        module->code = header;
    cubin_registers(image, note_registers, module);
    cubin_kernels(image, note_kernel, module);
    return module;
}

unsigned module_kernels(struct module *module, struct function **kernels, unsigned room)
{
    for (unsigned i = 0; i < module->kernel_count && i < room; i++)
        kernels[i] = module->kernels[i];
    return module->kernel_count;
}

struct module *module_from_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (!file)
        return NULL;
    fseek(file, 0, SEEK_END);
    long bytes = ftell(file);
    char *image = bytes > 0 ? calloc(1, (size_t)bytes + 1) : NULL; /* kept: the module's names are in it */
    rewind(file);
    bool whole = image && fread(image, 1, (size_t)bytes, file) == (size_t)bytes;
    fclose(file);
    return whole ? module_new(image) : NULL;
}

/* The code a card runs: machine code of its major version and at most its minor one, the newest; without
 * that, the newest PTX it can translate. */
static void choose_code(struct module *module)
{
    int device = 10 * config()->major + config()->minor, elf = 0, ptx = 0;
    const char *at = (const char *)module->code;
    const char *end = at;
    if (at) {
        end = at + module->code->header_bytes + module->code->bytes;
        at += module->code->header_bytes;
    }
    while (at + sizeof(struct fatbin_entry) <= end) {
        const struct fatbin_entry *entry = (const struct fatbin_entry *)at;
        int architecture = (int)entry->architecture;
        if (entry->kind == ENTRY_ELF && architecture / 10 == device / 10 && architecture <= device &&
            architecture > elf)
            elf = architecture;
        if (entry->kind == ENTRY_PTX && architecture <= device && architecture > ptx)
            ptx = architecture;
        if (entry->header_bytes == 0)
            break;
        at += entry->header_bytes + entry->bytes;
    }
    module->ptx_version = elf ? elf : ptx ? ptx : device;
    module->binary_version = elf ? elf : device;
}

struct function *module_function(struct module *module, const char *name)
{
    uint64_t key = name_key(name);
    pthread_mutex_lock(&lock);
    struct function *function = table_get(&module->functions, key);
    if (!function) {
        function = calloc(1, sizeof *function);
        function->text = strdup(name);
        function->module = module;
        table_put(&module->functions, key, function);
        table_put(&functions, (uint64_t)function, function);
    }
    pthread_mutex_unlock(&lock);
    return function;
}

/* ---- registration by the code nvcc generates ---- */

API void **__cudaRegisterFatBinary(void *wrapper)
{
    return (void **)module_new(wrapper);
}

API void __cudaRegisterFatBinaryEnd(void **module)
{
}

API void __cudaUnregisterFatBinary(void **module)
{
}

API char __cudaInitModule(void **module)
{
    return 0;
}

API void __cudaRegisterFunction(void **module, const char *stub, char *device_stub, const char *name, int limit,
                                void *thread, void *block, void *block_dim, void *grid_dim, int *warp)
{
    struct function *function = calloc(1, sizeof *function);
    function->text = name;
    function->module = (struct module *)module;
    pthread_mutex_lock(&lock);
    table_put(&functions, (uint64_t)stub, function);
    pthread_mutex_unlock(&lock);
}

API void __cudaRegisterVar(void **module, char *host, char *device, const char *name, int external, size_t bytes,
                           int constant, int global)
{
    struct variable *variable = calloc(1, sizeof *variable);
    variable->name = name;
    variable->bytes = bytes;
    pthread_mutex_lock(&lock);
    table_put(&variables, (uint64_t)host, variable);
    pthread_mutex_unlock(&lock);
}

API void __cudaRegisterManagedVar(void **module, void **host, char *device, const char *name, int external,
                                  size_t bytes, int constant, int global)
{
    memory_manage(host, bytes);
}

/* ---- device variables: part of the module, not of the counted memory ---- */

static struct variable *variable_of(const void *symbol)
{
    pthread_mutex_lock(&lock);
    struct variable *variable = table_get(&variables, (uint64_t)symbol);
    if (variable && !variable->address)
        variable->address = space_reserve(variable->bytes, GRANULE);
    pthread_mutex_unlock(&lock);
    return variable;
}

API cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol)
{
    const struct variable *variable = variable_of(symbol);
    *pointer = variable ? (void *)variable->address : NULL;
    return runtime_result(variable ? SUCCESS : 13); /* invalid device symbol */
}

API cudaError_t cudaGetSymbolSize(size_t *bytes, const void *symbol)
{
    const struct variable *variable = variable_of(symbol);
    *bytes = variable ? variable->bytes : 0;
    return runtime_result(variable ? SUCCESS : 13);
}

API cudaError_t cudaMemcpyAsync(void *, const void *, size_t, int, cudaStream_t);

API cudaError_t cudaMemcpyToSymbolAsync(const void *symbol, const void *source, size_t bytes, size_t offset,
                                        int kind, cudaStream_t stream)
{
    void *target;
    cudaError_t error = cudaGetSymbolAddress(&target, symbol);
    return error ? error : cudaMemcpyAsync((char *)target + offset, source, bytes, kind, stream);
}

API cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *source, size_t bytes, size_t offset, int kind)
{
    return cudaMemcpyToSymbolAsync(symbol, source, bytes, offset, kind, NULL);
}

API cudaError_t cudaMemcpyFromSymbolAsync(void *target, const void *symbol, size_t bytes, size_t offset, int kind,
                                          cudaStream_t stream)
{
    void *source;
    cudaError_t error = cudaGetSymbolAddress(&source, symbol);
    return error ? error : cudaMemcpyAsync(target, (char *)source + offset, bytes, kind, stream);
}

API cudaError_t cudaMemcpyFromSymbol(void *target, const void *symbol, size_t bytes, size_t offset, int kind)
{
    return cudaMemcpyFromSymbolAsync(target, symbol, bytes, offset, kind, NULL);
}

/* ---- functions ---- */

struct function *function_of(const void *handle)
{
    pthread_mutex_lock(&lock);
    struct function *function = table_get(&functions, (uint64_t)handle);
    pthread_mutex_unlock(&lock);
    return function;
}

static int registers_of(const struct function *function)
{
    struct module *module = function ? function->module : NULL;
    int known = module ? (int)(intptr_t)table_get(&module->registers, name_key(function->text)) : 0;
    return known ? known : REGISTERS_PER_THREAD;
}

void function_attributes(const struct function *function, struct cudaFuncAttributes *attributes)
{
    memset(attributes, 0, sizeof *attributes);
    struct module *module = function ? function->module : NULL;
    if (module && !module->binary_version)
        choose_code(module);
    int device = 10 * config()->major + config()->minor;
    attributes->binaryVersion = module ? module->binary_version : device;
    attributes->ptxVersion = module ? module->ptx_version : device;
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = registers_of(function);
    attributes->maxDynamicSharedSizeBytes = 48 * 1024;
    if (function && function->max_dynamic_shared_bytes)
        attributes->maxDynamicSharedSizeBytes = function->max_dynamic_shared_bytes;
    attributes->preferredShmemCarveout = function ? function->preferred_carveout : -1;
}

API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *handle)
{
    device_use(current_device);
    function_attributes(function_of(handle), attributes);
    return SUCCESS;
}

enum { FUNCTION_MAX_DYNAMIC_SHARED = 8, FUNCTION_CARVEOUT = 9 };

API cudaError_t cudaFuncSetAttribute(const void *handle, int attribute, int value)
{
    struct function *function = function_of(handle);
    if (attribute == FUNCTION_MAX_DYNAMIC_SHARED && value > config()->shared_per_block_bytes)
        return runtime_result(ERROR_INVALID_VALUE);
    if (function && attribute == FUNCTION_MAX_DYNAMIC_SHARED)
        function->max_dynamic_shared_bytes = value;
    if (function && attribute == FUNCTION_CARVEOUT)
        function->preferred_carveout = value;
    return SUCCESS;
}

API cudaError_t cudaFuncSetCacheConfig(const void *handle, int preference)
{
    return SUCCESS;
}

API cudaError_t cudaFuncGetName(const char **name, const void *handle)
{
    const struct function *function = function_of(handle);
    *name = function ? function->text : "";
    return SUCCESS;
}

API cudaError_t cudaGetFuncBySymbol(void **handle, const void *symbol)
{
    struct function *function = function_of(symbol);
    if (!function)
        return runtime_result(98); /* invalid device function */
    pthread_mutex_lock(&lock);
    table_put(&functions, (uint64_t)function, function); /* the handle is known from now on */
    pthread_mutex_unlock(&lock);
    *handle = function;
    return SUCCESS;
}

API cudaError_t cudaGetKernel(void **kernel, const void *symbol)
{
    return cudaGetFuncBySymbol(kernel, symbol);
}

API cudaError_t __cudaGetKernel(void **kernel, const void *symbol)
{
    return cudaGetFuncBySymbol(kernel, symbol);
}

/* ---- occupancy ---- */

/* Blocks of this size that one multiprocessor holds: the least of what threads, shared memory, registers
 * and the block limit allow. */
int occupancy(int block_threads, size_t dynamic_shared_bytes)
{
    const struct config *c = config();
    if (block_threads <= 0 || block_threads > 1024)
        return 0;
    int warps = (block_threads + 31) / 32;
    int most = c->threads_per_multiprocessor / 32 / warps;
    int by_registers = c->registers_per_multiprocessor / (REGISTERS_PER_THREAD * 32 * warps);
    size_t shared = dynamic_shared_bytes + (size_t)device_attribute(ATTRIBUTE_RESERVED_SHARED_PER_BLOCK, 0);
    int by_shared = shared ? (int)((size_t)c->shared_per_multiprocessor_bytes / shared) : most;
    if (by_registers < most)
        most = by_registers;
    if (by_shared < most)
        most = by_shared;
    if (blocks_per_multiprocessor() < most)
        most = blocks_per_multiprocessor();
    return most;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *handle,
                                                                       int block_threads, size_t shared_bytes,
                                                                       unsigned flags)
{
    *blocks = occupancy(block_threads, shared_bytes);
    return SUCCESS;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *handle, int block_threads,
                                                              size_t shared_bytes)
{
    *blocks = occupancy(block_threads, shared_bytes);
    return SUCCESS;
}

API cudaError_t cudaOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, const void *handle, int blocks,
                                                          int block_threads)
{
    const struct config *c = config();
    size_t share = blocks > 0 ? (size_t)(c->shared_per_multiprocessor_bytes / blocks) : 0;
    size_t reserved = (size_t)device_attribute(ATTRIBUTE_RESERVED_SHARED_PER_BLOCK, 0);
    *bytes = share > reserved ? share - reserved : 0;
    if (*bytes > (size_t)c->shared_per_block_bytes)
        *bytes = (size_t)c->shared_per_block_bytes;
    return SUCCESS;
}

API cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *handle,
                                               const struct cudaLaunchConfig *launch_config)
{
    const unsigned *b = launch_config->block;
    *clusters = config()->multiprocessors *
                occupancy((int)(b[0] * b[1] * b[2]), launch_config->dynamicSmemBytes) / 8;
    return SUCCESS;
}

API cudaError_t cudaOccupancyMaxPotentialClusterSize(int *size, const void *handle,
                                                     const struct cudaLaunchConfig *launch_config)
{
    *size = config()->major >= 9 ? 8 : 1; /* the portable cluster size */
    return SUCCESS;
}

/* ---- launches ---- */

void launch(struct function *function, struct dim3 grid, struct dim3 block, size_t shared_bytes,
            cudaStream_t stream)
{
    if (function && !function->name)
        function->name = name_id(function->text);
    struct operation work = {.record = {
                                 .kind = RECORD_KERNEL,
                                 .name = function ? function->name : 0,
                                 .grid_x = grid.x,
                                 .grid_y = grid.y,
                                 .grid_z = grid.z,
                                 .block = block.x * block.y * block.z,
                                 .shared = (uint32_t)shared_bytes,
                             }};
    submit(stream, &work);
}

/* A library's work of known shape: for matrix products m, n, k and the batch. */
void library_call(const char *name, int dtype, int m, int n, int k, int batch, cudaStream_t stream)
{
    struct operation work = {.record = {
                                 .kind = RECORD_LIBRARY,
                                 .flags = (uint16_t)(dtype & 0x7fff),
                                 .name = name_id(name),
                                 .grid_x = (uint32_t)m,
                                 .grid_y = (uint32_t)n,
                                 .grid_z = (uint32_t)k,
                                 .block = (uint32_t)batch,
                             }};
    submit(stream, &work);
}

/* Work of a library without a shape; every handle begins with its stream.  Called by generated stubs. */
API void ghost_library_work(const char *name, void *handle)
{
    bool readable = (uintptr_t)handle > 4096 && !is_device_address(handle);
    library_call(name, 0, 0, 0, 0, 0, readable ? *(cudaStream_t *)handle : NULL);
}

/* <<<...>>> pushes its configuration, the generated stub pops it. */
static __thread struct {
    struct dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
} pushed[16];
static __thread unsigned depth;

API unsigned __cudaPushCallConfiguration(struct dim3 grid, struct dim3 block, size_t shared_bytes, void *stream)
{
    unsigned i = depth++ % 16;
    pushed[i].grid = grid;
    pushed[i].block = block;
    pushed[i].shared_bytes = shared_bytes;
    pushed[i].stream = stream;
    return 0;
}

API cudaError_t __cudaPopCallConfiguration(struct dim3 *grid, struct dim3 *block, size_t *shared_bytes,
                                           void *stream)
{
    unsigned i = --depth % 16;
    *grid = pushed[i].grid;
    *block = pushed[i].block;
    *shared_bytes = pushed[i].shared_bytes;
    *(cudaStream_t *)stream = pushed[i].stream;
    return SUCCESS;
}

API cudaError_t cudaLaunchKernel(const void *handle, struct dim3 grid, struct dim3 block, void **arguments,
                                 size_t shared_bytes, cudaStream_t stream)
{
    launch(function_of(handle), grid, block, shared_bytes, stream);
    return SUCCESS;
}

API cudaError_t __cudaLaunchKernel(void *kernel, struct dim3 grid, struct dim3 block, void **arguments,
                                   size_t shared_bytes, cudaStream_t stream)
{
    launch(function_of(kernel), grid, block, shared_bytes, stream);
    return SUCCESS;
}

API cudaError_t cudaLaunchCooperativeKernel(const void *handle, struct dim3 grid, struct dim3 block,
                                            void **arguments, size_t shared_bytes, cudaStream_t stream)
{
    launch(function_of(handle), grid, block, shared_bytes, stream);
    return SUCCESS;
}

API cudaError_t cudaLaunchKernelExC(const struct cudaLaunchConfig *c, const void *handle, void **arguments)
{
    struct dim3 grid = {c->grid[0], c->grid[1], c->grid[2]}, block = {c->block[0], c->block[1], c->block[2]};
    launch(function_of(handle), grid, block, c->dynamicSmemBytes, c->stream);
    return SUCCESS;
}
