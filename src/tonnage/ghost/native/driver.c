/* The driver interface (libcuda): contexts, modules and launches, and thin forms of what the runtime does. */
#define _GNU_SOURCE
#include "ghost.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct context *CUcontext;

/* The runtime's functions that do the work here too. */
API cudaError_t cudaMemcpyAsync(void *, const void *, size_t, int, cudaStream_t);
API cudaError_t cudaMemcpy(void *, const void *, size_t, int);
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *, unsigned, int);
API cudaError_t cudaStreamDestroy(cudaStream_t);
API cudaError_t cudaStreamQuery(cudaStream_t);
API cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned);
API cudaError_t cudaStreamIsCapturing(cudaStream_t, int *);
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *, unsigned);
API cudaError_t cudaEventDestroy(cudaEvent_t);
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t, unsigned);
API cudaError_t cudaEventQuery(cudaEvent_t);
API cudaError_t cudaEventSynchronize(cudaEvent_t);
API cudaError_t cudaEventElapsedTime(float *, cudaEvent_t, cudaEvent_t);
API cudaError_t cudaLaunchHostFunc(cudaStream_t, void (*)(void *), void *);
API cudaError_t cudaMallocAsync(void **, size_t, cudaStream_t);
API cudaError_t cudaFreeHost(void *);
API cudaError_t cudaHostRegister(void *, size_t, unsigned);
API cudaError_t cudaHostUnregister(void *);
API cudaError_t cudaThreadExchangeStreamCaptureMode(int *);
API cudaError_t cudaFuncSetAttribute(const void *, int, int);
API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *, const void *);

/* ---- initialisation and devices ---- */

API CUresult cuInit(unsigned flags)
{
    return device_count() ? SUCCESS : ERROR_NO_DEVICE;
}

API CUresult cuDriverGetVersion(int *version)
{
    *version = GHOST_RUNTIME_VERSION;
    return SUCCESS;
}

API cudaError_t cudaDriverGetVersion(int *version)
{
    return cuDriverGetVersion(version);
}

API cudaError_t cudaRuntimeGetVersion(int *version)
{
    return cuDriverGetVersion(version);
}

API CUresult cuGetErrorString(CUresult error, const char **text)
{
    *text = error_text(error);
    return SUCCESS;
}

API CUresult cuGetErrorName(CUresult error, const char **name)
{
    *name = error_name(error);
    return SUCCESS;
}

API CUresult cuDeviceGetCount(int *count)
{
    *count = device_count();
    return SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    if (ordinal < 0 || ordinal >= device_count())
        return ERROR_INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

API CUresult cuDeviceGetName(char *name, int room, CUdevice device)
{
    snprintf(name, room, "%s", config()->name);
    return SUCCESS;
}

API CUresult cuDeviceGetUuid_v2(unsigned char *uuid, CUdevice device)
{
    card_uuid(device_physical(device), uuid);
    return SUCCESS;
}

API CUresult cuDeviceGetUuid(unsigned char *uuid, CUdevice device)
{
    return cuDeviceGetUuid_v2(uuid, device);
}

API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    *bytes = config()->total_bytes;
    return SUCCESS;
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    *value = device_attribute(attribute, device);
    return SUCCESS;
}

API CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice device)
{
    *major = config()->major;
    *minor = config()->minor;
    return SUCCESS;
}

API CUresult cuDeviceGetPCIBusId(char *text, int room, CUdevice device)
{
    snprintf(text, room, "0000:%02x:00.0", device_physical(device) + 1);
    return SUCCESS;
}

API CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
    *can = device != peer;
    return SUCCESS;
}

/* ---- contexts: each device has its primary one ---- */

static struct context {
    int device;
} contexts[MAX_DEVICES];

static CUcontext context_of(int device)
{
    contexts[device].device = device;
    return &contexts[device];
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    *context = context_of(device);
    return device_use(device);
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    return SUCCESS;
}

API CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
    return SUCCESS;
}

API CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags)
{
    return SUCCESS;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    *flags = 0;
    *active = device_active(device);
    return SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext *context)
{
    *context = device_active(current_device) ? context_of(current_device) : NULL;
    return SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext context)
{
    if (!context)
        return SUCCESS;
    current_device = context->device;
    return device_use(current_device);
}

static __thread int stack[16];
static __thread unsigned stack_depth;

API CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    stack[stack_depth++ % 16] = current_device;
    return cuCtxSetCurrent(context);
}

API CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    if (context)
        *context = context_of(current_device);
    if (stack_depth)
        current_device = stack[--stack_depth % 16];
    return SUCCESS;
}

API CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device)
{
    stack[stack_depth++ % 16] = current_device;
    current_device = device;
    return cuDevicePrimaryCtxRetain(context, device);
}

API CUresult cuCtxCreate_v4(CUcontext *context, void *parameters, unsigned flags, CUdevice device)
{
    return cuCtxCreate_v2(context, flags, device);
}

API CUresult cuCtxDestroy_v2(CUcontext context)
{
    return SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice *device)
{
    *device = current_device;
    return SUCCESS;
}

API CUresult cuCtxGetApiVersion(CUcontext context, unsigned *version)
{
    *version = 3020;
    return SUCCESS;
}

API CUresult cuCtxGetFlags(unsigned *flags)
{
    *flags = 0;
    return SUCCESS;
}

API cudaError_t cudaDeviceGetLimit(size_t *, int);

API CUresult cuCtxGetLimit(size_t *value, int limit)
{
    return cudaDeviceGetLimit(value, limit);
}

API CUresult cuCtxSetLimit(int limit, size_t value)
{
    return SUCCESS;
}

API CUresult cuCtxSetCacheConfig(int preference)
{
    return SUCCESS;
}

API CUresult cuCtxSynchronize(void)
{
    device_use(current_device);
    device_synchronise(current_device);
    return SUCCESS;
}

API CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return SUCCESS;
}

API CUresult cuCtxEnablePeerAccess(CUcontext context, unsigned flags)
{
    return SUCCESS;
}

/* ---- modules and functions ---- */

API CUresult cuModuleLoadData(struct module **module, const void *image)
{
    device_use(current_device);
    *module = module_new(image);
    return SUCCESS;
}

API CUresult cuModuleLoadDataEx(struct module **module, const void *image, unsigned count, int *options,
                                void **values)
{
    return cuModuleLoadData(module, image);
}

API CUresult cuModuleLoadFatBinary(struct module **module, const void *image)
{
    return cuModuleLoadData(module, image);
}

API CUresult cuModuleUnload(struct module *module)
{
    return SUCCESS;
}

API CUresult cuModuleGetLoadingMode(int *mode)
{
    *mode = 2; /* lazy, the driver's default */
    return SUCCESS;
}

API CUresult cuModuleGetFunction(struct function **function, struct module *module, const char *name)
{
    *function = module_function(module, name);
    return SUCCESS;
}

API CUresult cuModuleGetGlobal_v2(CUdeviceptr *pointer, size_t *bytes, struct module *module, const char *name)
{
    uint64_t address = space_reserve(GRANULE, GRANULE); /* its size is in the image, which is not read */
    if (pointer)
        *pointer = address;
    if (bytes)
        *bytes = 0;
    return address ? SUCCESS : ERROR_OUT_OF_MEMORY;
}

enum { FUNCTION_MAX_THREADS, FUNCTION_SHARED, FUNCTION_CONSTANT, FUNCTION_LOCAL, FUNCTION_REGISTERS, FUNCTION_PTX,
       FUNCTION_BINARY, FUNCTION_CACHE, FUNCTION_DYNAMIC_SHARED, FUNCTION_CARVEOUT };

API CUresult cuFuncGetAttribute(int *value, int attribute, const struct function *function)
{
    struct cudaFuncAttributes a;
    function_attributes(function, &a);
    const int values[] = {
        [FUNCTION_MAX_THREADS] = a.maxThreadsPerBlock,
        [FUNCTION_SHARED] = (int)a.sharedSizeBytes,
        [FUNCTION_CONSTANT] = (int)a.constSizeBytes,
        [FUNCTION_LOCAL] = (int)a.localSizeBytes,
        [FUNCTION_REGISTERS] = a.numRegs,
        [FUNCTION_PTX] = a.ptxVersion,
        [FUNCTION_BINARY] = a.binaryVersion,
        [FUNCTION_CACHE] = 0,
        [FUNCTION_DYNAMIC_SHARED] = a.maxDynamicSharedSizeBytes,
        [FUNCTION_CARVEOUT] = a.preferredShmemCarveout,
    };
    *value = attribute >= 0 && attribute <= FUNCTION_CARVEOUT ? values[attribute] : 0;
    return SUCCESS;
}

API CUresult cuKernelGetAttribute(int *value, int attribute, const struct function *kernel, CUdevice device)
{
    return cuFuncGetAttribute(value, attribute, kernel);
}

API CUresult cuFuncSetAttribute(struct function *function, int attribute, int value)
{
    return cudaFuncSetAttribute(function, attribute, value);
}

API CUresult cuKernelSetAttribute(int attribute, int value, struct function *kernel, CUdevice device)
{
    return cudaFuncSetAttribute(kernel, attribute, value);
}

API CUresult cuFuncSetCacheConfig(struct function *function, int preference)
{
    return SUCCESS;
}

API CUresult cuFuncGetName(const char **name, const struct function *function)
{
    *name = function->text;
    return SUCCESS;
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const struct function *function,
                                                         int block_threads, size_t shared_bytes)
{
    *blocks = occupancy(block_threads, shared_bytes);
    return SUCCESS;
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const struct function *function,
                                                                  int block_threads, size_t shared_bytes,
                                                                  unsigned flags)
{
    *blocks = occupancy(block_threads, shared_bytes);
    return SUCCESS;
}

API CUresult cuOccupancyMaxActiveClusters(int *clusters, const struct function *function,
                                          const struct CUlaunchConfig *c)
{
    int threads = (int)(c->blockDimX * c->blockDimY * c->blockDimZ);
    *clusters = config()->multiprocessors * occupancy(threads, c->sharedMemBytes) / 8;
    return SUCCESS;
}

API CUresult cuLaunchKernel(struct function *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                            unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                            cudaStream_t stream, void **arguments, void **extra)
{
    launch(function, (struct dim3){grid_x, grid_y, grid_z}, (struct dim3){block_x, block_y, block_z},
           shared_bytes, stream);
    return SUCCESS;
}

API CUresult cuLaunchCooperativeKernel(struct function *function, unsigned grid_x, unsigned grid_y,
                                       unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
                                       unsigned shared_bytes, cudaStream_t stream, void **arguments)
{
    return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream,
                          arguments, NULL);
}

API CUresult cuLaunchKernelEx(const struct CUlaunchConfig *c, struct function *function, void **arguments,
                              void **extra)
{
    return cuLaunchKernel(function, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY,
                          c->blockDimZ, c->sharedMemBytes, c->hStream, arguments, extra);
}

API CUresult cuLaunchHostFunc(cudaStream_t stream, void (*call)(void *), void *argument)
{
    return cudaLaunchHostFunc(stream, call, argument);
}

/* A tensor map is 128 bytes that only a kernel reads. */
API CUresult cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const uint64_t *sizes,
                                    const uint64_t *strides, const uint32_t *box, const uint32_t *steps,
                                    int interleave, int swizzle, int promotion, int fill)
{
    memset(map, 0, 128);
    return SUCCESS;
}

/* ---- memory ---- */

API CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
    if (bytes == 0)
        return ERROR_INVALID_VALUE;
    return memory_allocate((void **)pointer, bytes, current_device);
}

API CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned flags)
{
    return memory_manage((void **)pointer, bytes);
}

API CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, cudaStream_t stream)
{
    return cudaMallocAsync((void **)pointer, bytes, stream);
}

API CUresult cuMemFree_v2(CUdeviceptr pointer)
{
    return memory_free((void *)pointer);
}

API CUresult cuMemFreeAsync(CUdeviceptr pointer, cudaStream_t stream)
{
    return memory_free((void *)pointer);
}

API CUresult cuMemAllocHost_v2(void **pointer, size_t bytes)
{
    return memory_pin(pointer, bytes);
}

API CUresult cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags)
{
    return memory_pin(pointer, bytes);
}

API CUresult cuMemFreeHost(void *pointer)
{
    return cudaFreeHost(pointer);
}

API CUresult cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned flags)
{
    return cudaHostRegister(pointer, bytes, flags);
}

API CUresult cuMemHostUnregister(void *pointer)
{
    return cudaHostUnregister(pointer);
}

API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device_pointer, void *pointer, unsigned flags)
{
    *device_pointer = (CUdeviceptr)pointer;
    return SUCCESS;
}

API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    CUresult result = device_use(current_device);
    *free_bytes = device_free_bytes(current_device);
    *total_bytes = config()->total_bytes;
    return result;
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr *start, size_t *bytes, CUdeviceptr pointer)
{
    return memory_range(pointer, start, bytes, NULL);
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void *source, size_t bytes)
{
    return cudaMemcpy((void *)target, source, bytes, 0);
}

API CUresult cuMemcpyDtoH_v2(void *target, CUdeviceptr source, size_t bytes)
{
    return cudaMemcpy(target, (void *)source, bytes, 0);
}

API CUresult cuMemcpyDtoD_v2(CUdeviceptr target, CUdeviceptr source, size_t bytes)
{
    return cudaMemcpyAsync((void *)target, (void *)source, bytes, 0, NULL);
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void *source, size_t bytes, cudaStream_t stream)
{
    return cudaMemcpyAsync((void *)target, source, bytes, 0, stream);
}

API CUresult cuMemcpyDtoHAsync_v2(void *target, CUdeviceptr source, size_t bytes, cudaStream_t stream)
{
    return cudaMemcpyAsync(target, (void *)source, bytes, 0, stream);
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr target, CUdeviceptr source, size_t bytes, cudaStream_t stream)
{
    return cudaMemcpyAsync((void *)target, (void *)source, bytes, 0, stream);
}

API CUresult cuMemcpy(CUdeviceptr target, CUdeviceptr source, size_t bytes)
{
    return cudaMemcpy((void *)target, (void *)source, bytes, 0);
}

API CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t bytes, cudaStream_t stream)
{
    return cudaMemcpyAsync((void *)target, (void *)source, bytes, 0, stream);
}

static CUresult fill(CUdeviceptr target, int value, int value_bytes, size_t count, cudaStream_t stream)
{
    size_t bytes = count * value_bytes;
    struct operation work = {
        .action = DO_FILL, .target = (void *)target, .value = value, .value_bytes = value_bytes, .height = 1};
    work.record = (struct ghost_record){.kind = RECORD_MEMSET, .bytes = bytes, .address = target};
    work.width = bytes;
    if (bytes)
        submit(stream, &work);
    return SUCCESS;
}

API CUresult cuMemsetD8_v2(CUdeviceptr target, unsigned char value, size_t count)
{
    return fill(target, value, 1, count, NULL);
}

API CUresult cuMemsetD16_v2(CUdeviceptr target, unsigned short value, size_t count)
{
    return fill(target, value, 2, count, NULL);
}

API CUresult cuMemsetD32_v2(CUdeviceptr target, unsigned value, size_t count)
{
    return fill(target, (int)value, 4, count, NULL);
}

API CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t count, cudaStream_t stream)
{
    return fill(target, value, 1, count, stream);
}

API CUresult cuMemsetD16Async(CUdeviceptr target, unsigned short value, size_t count, cudaStream_t stream)
{
    return fill(target, value, 2, count, stream);
}

API CUresult cuMemsetD32Async(CUdeviceptr target, unsigned value, size_t count, cudaStream_t stream)
{
    return fill(target, (int)value, 4, count, stream);
}

/* Stream memory operations: a wait is over at once, a write is a fill. */
API CUresult cuStreamWriteValue32_v2(cudaStream_t stream, CUdeviceptr target, uint32_t value, unsigned flags)
{
    return fill(target, (int)value, 4, 1, stream);
}

API CUresult cuStreamWaitValue32_v2(cudaStream_t stream, CUdeviceptr target, uint32_t value, unsigned flags)
{
    return SUCCESS;
}

enum { POINTER_CONTEXT = 1, POINTER_MEMORY_TYPE, POINTER_DEVICE_POINTER, POINTER_HOST_POINTER, POINTER_MANAGED = 8,
       POINTER_DEVICE_ORDINAL = 9, POINTER_RANGE_START = 11, POINTER_RANGE_SIZE = 12 };

API CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr pointer)
{
    struct cudaPointerAttributes a;
    uint64_t start = pointer, bytes = 0;
    cudaPointerGetAttributes(&a, (void *)pointer);
    memory_range(pointer, &start, &bytes, NULL);
    if (a.type == 0)
        return ERROR_INVALID_VALUE; /* ordinary host memory */
    switch (attribute) {
    case POINTER_CONTEXT:
        *(CUcontext *)data = context_of(a.device);
        return SUCCESS;
    case POINTER_MEMORY_TYPE:
        *(unsigned *)data = a.type == 1 ? 1 : 2; /* host, device */
        return SUCCESS;
    case POINTER_DEVICE_POINTER:
    case POINTER_HOST_POINTER:
        *(uint64_t *)data = pointer;
        return SUCCESS;
    case POINTER_MANAGED:
        *(unsigned *)data = a.type == 3;
        return SUCCESS;
    case POINTER_DEVICE_ORDINAL:
        *(int *)data = a.device;
        return SUCCESS;
    case POINTER_RANGE_START:
        *(uint64_t *)data = start;
        return SUCCESS;
    case POINTER_RANGE_SIZE:
        *(size_t *)data = bytes;
        return SUCCESS;
    default:
        *(int *)data = 0;
        return SUCCESS;
    }
}

/* ---- streams and events ---- */

API CUresult cuStreamCreate(cudaStream_t *stream, unsigned flags)
{
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

API CUresult cuStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
    return cudaStreamCreateWithPriority(stream, flags, priority);
}

API CUresult cuStreamDestroy_v2(cudaStream_t stream)
{
    return cudaStreamDestroy(stream);
}

API CUresult cuStreamSynchronize(cudaStream_t stream)
{
    return stream_synchronise(stream);
}

API CUresult cuStreamQuery(cudaStream_t stream)
{
    return cudaStreamQuery(stream);
}

API CUresult cuStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    return cudaStreamWaitEvent(stream, event, flags);
}

API CUresult cuStreamIsCapturing(cudaStream_t stream, int *status)
{
    return cudaStreamIsCapturing(stream, status);
}

API CUresult cuStreamGetCtx(cudaStream_t stream, CUcontext *context)
{
    *context = context_of(stream_of(stream)->device);
    return SUCCESS;
}

API CUresult cuStreamGetId(cudaStream_t stream, unsigned long long *id)
{
    *id = stream_of(stream)->id;
    return SUCCESS;
}

API CUresult cuThreadExchangeStreamCaptureMode(int *mode)
{
    return cudaThreadExchangeStreamCaptureMode(mode);
}

API CUresult cuEventCreate(cudaEvent_t *event, unsigned flags)
{
    return cudaEventCreateWithFlags(event, flags);
}

API CUresult cuEventDestroy_v2(cudaEvent_t event)
{
    return cudaEventDestroy(event);
}

API CUresult cuEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    return cudaEventRecordWithFlags(event, stream, 0);
}

API CUresult cuEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags)
{
    return cudaEventRecordWithFlags(event, stream, flags);
}

API CUresult cuEventQuery(cudaEvent_t event)
{
    return cudaEventQuery(event);
}

API CUresult cuEventSynchronize(cudaEvent_t event)
{
    return cudaEventSynchronize(event);
}

API CUresult cuEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end)
{
    return cudaEventElapsedTime(milliseconds, start, end);
}

API CUresult cuEventElapsedTime_v2(float *milliseconds, cudaEvent_t start, cudaEvent_t end)
{
    return cudaEventElapsedTime(milliseconds, start, end);
}

/* ---- entry points by name ---- */

API CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    *function = driver_symbol(name, version);
    if (status)
        *status = *function ? 0 : 1;
    return *function ? SUCCESS : ERROR_NOT_FOUND;
}

API CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

API CUresult cuGetExportTable(const void **table, const void *id)
{
    *table = NULL;
    return ERROR_NOT_FOUND; /* NVIDIA's private interfaces: a statically linked runtime needs them */
}

API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                                 unsigned long long flags, int *status)
{
    return runtime_result(cuGetProcAddress_v2(name, function, (int)version, flags, status));
}

API cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *status)
{
    return runtime_result(cuGetProcAddress_v2(name, function, GHOST_RUNTIME_VERSION, flags, status));
}
