/* Devices: how many, what they are, and which this process uses. */
#define _GNU_SOURCE
#include "ghost.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

__thread int current_device;

static bool active[MAX_DEVICES];
static int first_process;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- which cards the process sees: CUDA_VISIBLE_DEVICES, read at the first question as the driver does ---- */

static struct {
    bool known;
    int count, cards[MAX_DEVICES];
} visible;

void card_uuid(int card, unsigned char bytes[16])
{
    memcpy(bytes, "ghost GPU number", 16);
    bytes[15] = (unsigned char)card;
}

/* As the driver writes it: "GPU-" and the 16 bytes in groups. */
void card_uuid_text(int card, char text[48])
{
    unsigned char b[16];
    card_uuid(card, b);
    int at = sprintf(text, "GPU-");
    for (int i = 0; i < 16; i++)
        at += sprintf(text + at, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", b[i]);
}

/* The card an entry names, by number or by (the beginning of) its UUID; -1 if none. */
static int card_named(const char *entry)
{
    char *end, uuid[48];
    long number = strtol(entry, &end, 10);
    if (end != entry && *end == 0)
        return number >= 0 && number < config()->devices ? (int)number : -1;
    for (int card = 0; card < config()->devices && strncmp(entry, "GPU-", 4) == 0; card++) {
        card_uuid_text(card, uuid);
        if (strncmp(uuid, entry, strlen(entry)) == 0)
            return card;
    }
    return -1;
}

/* Entries count up to the first that names no card; one named twice leaves none. */
static void read_visible(const char *list)
{
    char copy[1024], *rest;
    snprintf(copy, sizeof copy, "%s", list);
    visible.count = 0;
    for (char *entry = strtok_r(copy, ", ", &rest); entry; entry = strtok_r(NULL, ", ", &rest)) {
        int card = card_named(entry);
        if (card < 0)
            return;
        for (int i = 0; i < visible.count; i++)
            if (visible.cards[i] == card) {
                visible.count = 0;
                return;
            }
        visible.cards[visible.count++] = card;
    }
}

static void find_visible(void)
{
    pthread_mutex_lock(&lock);
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible.known && list) {
        read_visible(list);
    } else if (!visible.known) {
        visible.count = config()->devices;
        for (int i = 0; i < visible.count; i++)
            visible.cards[i] = i;
    }
    __atomic_store_n(&visible.known, true, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
}

int device_count(void)
{
    if (!__atomic_load_n(&visible.known, __ATOMIC_ACQUIRE))
        find_visible();
    return visible.count;
}

void devices_changed(void)
{
    visible.known = false;
}

int device_physical(int device)
{
    return device < device_count() ? visible.cards[device] : device;
}

int device_of_physical(int physical)
{
    for (int i = 0; i < device_count(); i++)
        if (visible.cards[i] == physical)
            return i;
    return -1;
}

static bool valid(int device)
{
    return device >= 0 && device < device_count();
}

cudaError_t device_use(int device)
{
    if (!valid(device) || __atomic_load_n(&active[device], __ATOMIC_ACQUIRE))
        return SUCCESS;
    pthread_mutex_lock(&lock);
    bool fits = active[device] || card_take(device_physical(device), config()->context_bytes);
    if (fits) {
        if (!first_process)
            first_process = getpid();
        __atomic_store_n(&active[device], true, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&lock);
    return fits ? SUCCESS : ERROR_OUT_OF_MEMORY;
}

bool device_active(int device)
{
    return valid(device) && active[device];
}

bool device_any_active(void)
{
    return first_process != 0;
}

int device_process(void)
{
    return first_process;
}

bool device_take(int device, uint64_t bytes)
{
    return device_use(device) == SUCCESS && card_take(device_physical(device), bytes);
}

void device_give(int device, uint64_t bytes)
{
    card_give(device_physical(device), bytes);
}

uint64_t device_free_bytes(int device)
{
    uint64_t total = config()->total_bytes, used = card_used(device_physical(device));
    return used < total ? total - used : 0;
}

/* Takes memory of this thread's device that nothing here allocates (kernels that libraries load), or gives it back where
 * `bytes` is negative.  0: done; 1: it does not fit. */
API int ghost_take_outside(int64_t bytes)
{
    if (bytes < 0)
        device_give(current_device, (uint64_t)-bytes);
    return bytes > 0 && !device_take(current_device, (uint64_t)bytes);
}

/* Bytes this process has of the device, its context included. */
API uint64_t ghost_device_used(int device)
{
    return valid(device) ? card_used_here(device_physical(device)) : 0;
}

API uint64_t ghost_device_peak(int device)
{
    return valid(device) ? card_peak_here(device_physical(device)) : 0;
}

/* A device's number among all cards of the machine. */
API int ghost_device_card(int device)
{
    return device_physical(device);
}

/* Resident blocks per multiprocessor by compute capability: CUDA programming guide, table of technical
 * specifications per compute capability. */
int blocks_per_multiprocessor(void)
{
    int capability = 10 * config()->major + config()->minor;
    switch (capability) {
    case 75:
    case 86:
    case 87:
        return 16;
    case 89:
    case 110:
        return 24;
    case 120:
    case 121:
        return 24;
    default:
        return 32;
    }
}

int device_attribute(int attribute, int device)
{
    const struct config *c = config();
    switch (attribute) {
    case ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case ATTRIBUTE_MAX_BLOCK_DIM_X:
    case ATTRIBUTE_MAX_BLOCK_DIM_Y:
    case ATTRIBUTE_RESERVED_SHARED_PER_BLOCK:
        if (attribute == ATTRIBUTE_RESERVED_SHARED_PER_BLOCK && c->major < 8)
            return 0; /* the system's 1 KiB a block came with compute capability 8 */
        return 1024;
    case ATTRIBUTE_MAX_BLOCK_DIM_Z:
        return 64;
    case ATTRIBUTE_MAX_GRID_DIM_X:
    case ATTRIBUTE_MAX_PITCH:
        return INT32_MAX;
    case ATTRIBUTE_MAX_GRID_DIM_Y:
    case ATTRIBUTE_MAX_GRID_DIM_Z:
        return 65535;
    case ATTRIBUTE_MAX_SHARED_PER_BLOCK:
        return 48 * 1024;
    case ATTRIBUTE_TOTAL_CONSTANT:
        return 65536;
    case ATTRIBUTE_WARP_SIZE:
        return 32;
    case ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
        return 65536;
    case ATTRIBUTE_CLOCK_RATE:
        return c->clock_khz;
    case ATTRIBUTE_TEXTURE_ALIGNMENT:
        return 512;
    case ATTRIBUTE_MULTIPROCESSORS:
        return c->multiprocessors;
    case ATTRIBUTE_PCI_BUS:
        return device_physical(device) + 1;
    case ATTRIBUTE_MEMORY_CLOCK:
        return c->memory_khz;
    case ATTRIBUTE_BUS_WIDTH:
        return c->bus_bits;
    case ATTRIBUTE_L2_BYTES:
        return c->l2_bytes;
    case ATTRIBUTE_THREADS_PER_MULTIPROCESSOR:
        return c->threads_per_multiprocessor;
    case ATTRIBUTE_ASYNC_ENGINES:
        return 3;
    case ATTRIBUTE_MAJOR:
        return c->major;
    case ATTRIBUTE_MINOR:
        return c->minor;
    case ATTRIBUTE_SHARED_PER_MULTIPROCESSOR:
        return c->shared_per_multiprocessor_bytes;
    case ATTRIBUTE_REGISTERS_PER_MULTIPROCESSOR:
        return c->registers_per_multiprocessor;
    case ATTRIBUTE_SHARED_PER_BLOCK_OPTIN:
        return c->shared_per_block_bytes;
    case ATTRIBUTE_BLOCKS_PER_MULTIPROCESSOR:
        return blocks_per_multiprocessor();
    case ATTRIBUTE_PERSISTING_L2:
        return c->major >= 8 ? c->l2_bytes / 8 * 5 : 0;
    case ATTRIBUTE_CLUSTER_LAUNCH:
        return c->major >= 9;
    case ATTRIBUTE_GPU_OVERLAP:
    case ATTRIBUTE_CAN_MAP_HOST:
    case ATTRIBUTE_CONCURRENT_KERNELS:
    case ATTRIBUTE_ECC:
    case ATTRIBUTE_UNIFIED_ADDRESSING:
    case ATTRIBUTE_STREAM_PRIORITIES:
    case ATTRIBUTE_GLOBAL_L1:
    case ATTRIBUTE_LOCAL_L1:
    case ATTRIBUTE_MANAGED_MEMORY:
    case ATTRIBUTE_CONCURRENT_MANAGED:
    case ATTRIBUTE_COMPUTE_PREEMPTION:
    case ATTRIBUTE_HOST_POINTER_REGISTERED:
    case ATTRIBUTE_COOPERATIVE_LAUNCH:
    case ATTRIBUTE_HOST_REGISTER:
    case ATTRIBUTE_VIRTUAL_MEMORY:
    case ATTRIBUTE_POSIX_HANDLES:
    case ATTRIBUTE_MEMORY_POOLS:
    case ATTRIBUTE_UNIFIED_FUNCTION_POINTERS:
        return 1;
    default:
        return 0; /* optional features we do not claim */
    }
}

static void fill_properties(struct cudaDeviceProp *p, int device)
{
    const struct config *c = config();
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", c->name);
    card_uuid(device_physical(device), p->uuid);
    p->totalGlobalMem = c->total_bytes;
    p->sharedMemPerBlock = 48 * 1024;
    p->regsPerBlock = 65536;
    p->warpSize = 32;
    p->memPitch = INT32_MAX;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = INT32_MAX;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 65536;
    p->major = c->major;
    p->minor = c->minor;
    p->textureAlignment = p->surfaceAlignment = 512;
    p->texturePitchAlignment = 32;
    p->multiProcessorCount = c->multiprocessors;
    p->canMapHostMemory = p->concurrentKernels = p->ECCEnabled = p->unifiedAddressing = 1;
    p->pciBusID = device_physical(device) + 1;
    p->asyncEngineCount = 3;
    p->memoryBusWidth = c->bus_bits;
    p->l2CacheSize = c->l2_bytes;
    p->persistingL2CacheMaxSize = device_attribute(ATTRIBUTE_PERSISTING_L2, device);
    p->maxThreadsPerMultiProcessor = c->threads_per_multiprocessor;
    p->streamPrioritiesSupported = p->globalL1CacheSupported = p->localL1CacheSupported = 1;
    p->sharedMemPerMultiprocessor = c->shared_per_multiprocessor_bytes;
    p->regsPerMultiprocessor = c->registers_per_multiprocessor;
    p->managedMemory = p->concurrentManagedAccess = p->computePreemptionSupported = 1;
    p->canUseHostPointerForRegisteredMem = p->cooperativeLaunch = p->hostRegisterSupported = 1;
    p->sharedMemPerBlockOptin = c->shared_per_block_bytes;
    p->maxBlocksPerMultiProcessor = blocks_per_multiprocessor();
    p->reservedSharedMemPerBlock = device_attribute(ATTRIBUTE_RESERVED_SHARED_PER_BLOCK, device);
    p->memoryPoolsSupported = p->unifiedFunctionPointers = 1;
    p->clusterLaunch = device_attribute(ATTRIBUTE_CLUSTER_LAUNCH, device);
#if GHOST_CUDA == 12
    p->clockRate = c->clock_khz;
    p->memoryClockRate = c->memory_khz;
    p->deviceOverlap = 1;
#endif
}

API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
    if (!valid(device))
        return runtime_result(ERROR_INVALID_DEVICE);
    fill_properties(properties, device);
    return SUCCESS;
}

API cudaError_t cudaGetDeviceProperties_v2(struct cudaDeviceProp *properties, int device)
{
    return cudaGetDeviceProperties(properties, device);
}

API cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int device)
{
    if (!valid(device))
        return runtime_result(ERROR_INVALID_DEVICE);
    *value = device_attribute(attribute, device);
    return SUCCESS;
}

API cudaError_t cudaGetDeviceCount(int *count)
{
    *count = device_count();
    return runtime_result(*count ? SUCCESS : ERROR_NO_DEVICE);
}

API cudaError_t cudaGetDevice(int *device)
{
    *device = current_device;
    return SUCCESS;
}

API cudaError_t cudaSetDevice(int device)
{
    if (!valid(device))
        return runtime_result(ERROR_INVALID_DEVICE);
    current_device = device;
    return runtime_result(device_use(device)); /* since CUDA 12 this makes the context */
}

API cudaError_t cudaInitDevice(int device, unsigned device_flags, unsigned flags)
{
    if (!valid(device))
        return runtime_result(ERROR_INVALID_DEVICE);
    return runtime_result(device_use(device));
}

API cudaError_t cudaSetValidDevices(int *list, int count)
{
    return SUCCESS;
}

API cudaError_t cudaChooseDevice(int *device, const struct cudaDeviceProp *wanted)
{
    *device = 0;
    return SUCCESS;
}

API cudaError_t cudaSetDeviceFlags(unsigned flags)
{
    return SUCCESS;
}

API cudaError_t cudaGetDeviceFlags(unsigned *flags)
{
    *flags = 0;
    return SUCCESS;
}

API cudaError_t cudaDeviceReset(void)
{
    return SUCCESS;
}

API cudaError_t cudaDeviceGetLimit(size_t *value, int limit)
{
    static const size_t defaults[] = {1024, 1048576, 8388608, 2, 2048}; /* stack, printf, heap, depth, launches */
    *value = limit >= 0 && limit < 5 ? defaults[limit] : 0;
    return SUCCESS;
}

API cudaError_t cudaDeviceSetLimit(int limit, size_t value)
{
    return SUCCESS;
}

API cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device)
{
    if (!valid(device))
        return runtime_result(ERROR_INVALID_DEVICE);
    snprintf(text, size, "0000:%02x:00.0", device_physical(device) + 1);
    return SUCCESS;
}

API cudaError_t cudaDeviceGetByPCIBusId(int *device, const char *text)
{
    unsigned domain, bus;
    int found = sscanf(text, "%x:%x", &domain, &bus) == 2 ? device_of_physical((int)bus - 1) : -1;
    if (found < 0)
        return runtime_result(ERROR_INVALID_DEVICE);
    *device = found;
    return SUCCESS;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return SUCCESS;
}

/* ---- peers: every device of a process reaches every other ---- */

static bool peers[MAX_DEVICES][MAX_DEVICES];

API cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    if (!valid(device) || !valid(peer))
        return runtime_result(ERROR_INVALID_DEVICE);
    *can = device != peer;
    return SUCCESS;
}

API cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    if (!valid(peer) || peer == current_device)
        return runtime_result(ERROR_INVALID_DEVICE);
    if (peers[current_device][peer])
        return runtime_result(ERROR_PEER_ALREADY_ENABLED);
    peers[current_device][peer] = true;
    return SUCCESS;
}

API cudaError_t cudaDeviceDisablePeerAccess(int peer)
{
    if (!valid(peer))
        return runtime_result(ERROR_INVALID_DEVICE);
    peers[current_device][peer] = false;
    return SUCCESS;
}

API cudaError_t cudaDeviceGetP2PAttribute(int *value, int attribute, int device, int peer)
{
    *value = attribute == 2; /* access supported; no performance rank, no native atomics claimed */
    return SUCCESS;
}
