/* Structures that are the same in CUDA 12 and 13.  Included by cuda12.h and cuda13.h. */
#pragma once

#include <stddef.h>
#include <stdint.h>

struct cudaFuncAttributes {
    size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
    int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, cacheModeCA, maxDynamicSharedSizeBytes;
    int preferredShmemCarveout, clusterDimMustBeSet, requiredClusterWidth, requiredClusterHeight;
    int requiredClusterDepth, clusterSchedulingPolicyPreference, nonPortableClusterSizeAllowed, reserved[16];
};

struct cudaLaunchConfig { /* cudaLaunchConfig_t */
    unsigned grid[3], block[3];
    size_t dynamicSmemBytes;
    struct CUstream_st *stream;
    void *attrs;
    unsigned numAttrs;
};

struct CUlaunchConfig {
    unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
    struct CUstream_st *hStream;
    void *attrs;
    unsigned numAttrs;
};

struct cudaMemLocation { /* CUmemLocation */
    int type, id;
};

struct CUmemAllocationProp {
    int type, requestedHandleTypes;
    struct cudaMemLocation location;
    void *win32HandleMetaData;
    unsigned char compressionType, gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
};

struct CUmemAccessDesc {
    struct cudaMemLocation location;
    int flags;
};

struct cudaIpcMemHandle { /* cudaIpcMemHandle_t, cudaIpcEventHandle_t */
    char reserved[64];
};

struct cudaMemcpy3DParms {
    void *srcArray;
    size_t srcPos[3];
    struct cudaPitchedPtr {
        void *ptr;
        size_t pitch, xsize, ysize;
    } srcPtr;
    void *dstArray;
    size_t dstPos[3];
    struct cudaPitchedPtr dstPtr;
    size_t width, height, depth;
    int kind;
};

/* Attribute numbers (cudaDeviceAttr, CUdevice_attribute: the same numbers). */
enum device_attribute {
    ATTRIBUTE_MAX_THREADS_PER_BLOCK = 1,
    ATTRIBUTE_MAX_BLOCK_DIM_X = 2,
    ATTRIBUTE_MAX_BLOCK_DIM_Y = 3,
    ATTRIBUTE_MAX_BLOCK_DIM_Z = 4,
    ATTRIBUTE_MAX_GRID_DIM_X = 5,
    ATTRIBUTE_MAX_GRID_DIM_Y = 6,
    ATTRIBUTE_MAX_GRID_DIM_Z = 7,
    ATTRIBUTE_MAX_SHARED_PER_BLOCK = 8,
    ATTRIBUTE_TOTAL_CONSTANT = 9,
    ATTRIBUTE_WARP_SIZE = 10,
    ATTRIBUTE_MAX_PITCH = 11,
    ATTRIBUTE_MAX_REGISTERS_PER_BLOCK = 12,
    ATTRIBUTE_CLOCK_RATE = 13,
    ATTRIBUTE_TEXTURE_ALIGNMENT = 14,
    ATTRIBUTE_GPU_OVERLAP = 15,
    ATTRIBUTE_MULTIPROCESSORS = 16,
    ATTRIBUTE_CAN_MAP_HOST = 19,
    ATTRIBUTE_CONCURRENT_KERNELS = 31,
    ATTRIBUTE_ECC = 32,
    ATTRIBUTE_PCI_BUS = 33,
    ATTRIBUTE_PCI_DEVICE = 34,
    ATTRIBUTE_MEMORY_CLOCK = 36,
    ATTRIBUTE_BUS_WIDTH = 37,
    ATTRIBUTE_L2_BYTES = 38,
    ATTRIBUTE_THREADS_PER_MULTIPROCESSOR = 39,
    ATTRIBUTE_ASYNC_ENGINES = 40,
    ATTRIBUTE_UNIFIED_ADDRESSING = 41,
    ATTRIBUTE_MAJOR = 75,
    ATTRIBUTE_MINOR = 76,
    ATTRIBUTE_STREAM_PRIORITIES = 78,
    ATTRIBUTE_GLOBAL_L1 = 79,
    ATTRIBUTE_LOCAL_L1 = 80,
    ATTRIBUTE_SHARED_PER_MULTIPROCESSOR = 81,
    ATTRIBUTE_REGISTERS_PER_MULTIPROCESSOR = 82,
    ATTRIBUTE_MANAGED_MEMORY = 83,
    ATTRIBUTE_CONCURRENT_MANAGED = 89,
    ATTRIBUTE_COMPUTE_PREEMPTION = 90,
    ATTRIBUTE_HOST_POINTER_REGISTERED = 91,
    ATTRIBUTE_COOPERATIVE_LAUNCH = 95,
    ATTRIBUTE_SHARED_PER_BLOCK_OPTIN = 97,
    ATTRIBUTE_HOST_REGISTER = 99,
    ATTRIBUTE_VIRTUAL_MEMORY = 102,
    ATTRIBUTE_POSIX_HANDLES = 103,
    ATTRIBUTE_BLOCKS_PER_MULTIPROCESSOR = 106,
    ATTRIBUTE_PERSISTING_L2 = 108,
    ATTRIBUTE_RESERVED_SHARED_PER_BLOCK = 111,
    ATTRIBUTE_MEMORY_POOLS = 115,
    ATTRIBUTE_CLUSTER_LAUNCH = 120,
    ATTRIBUTE_UNIFIED_FUNCTION_POINTERS = 129,
};
