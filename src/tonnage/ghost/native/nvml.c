/* NVML: all cards of the machine, as nvidia-smi would show them whatever CUDA_VISIBLE_DEVICES is, with the memory
 * that the processes of the run hold.  The cards are idle. */
#include "ghost.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NVML_SUCCESS = 0, NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3, NVML_NOT_FOUND = 6, NVML_INSUFFICIENT_SIZE = 7 };

#if GHOST_CUDA == 12
#define DRIVER_VERSION "570.86.10"
#else
#define DRIVER_VERSION "580.65.06"
#endif

struct nvmlDevice {
    int index;
};
typedef struct nvmlDevice *nvmlDevice_t;

static struct nvmlDevice devices[MAX_DEVICES];

static int device_handle(int index, nvmlDevice_t *device)
{
    if (index < 0 || index >= config()->devices)
        return NVML_INVALID_ARGUMENT;
    devices[index].index = index;
    *device = &devices[index];
    return NVML_SUCCESS;
}

static int put_text(char *target, unsigned room, const char *text)
{
    if (strlen(text) >= room)
        return NVML_INSUFFICIENT_SIZE;
    strcpy(target, text);
    return NVML_SUCCESS;
}

API int nvmlInit_v2(void)
{
    return NVML_SUCCESS;
}

API int nvmlInit(void)
{
    return NVML_SUCCESS;
}

API int nvmlInitWithFlags(unsigned flags)
{
    return NVML_SUCCESS;
}

API int nvmlShutdown(void)
{
    return NVML_SUCCESS;
}

API const char *nvmlErrorString(int error)
{
    switch (error) {
    case NVML_SUCCESS:
        return "Success";
    case NVML_INVALID_ARGUMENT:
        return "Invalid Argument";
    case NVML_NOT_SUPPORTED:
        return "Not Supported";
    case NVML_NOT_FOUND:
        return "Not Found";
    case NVML_INSUFFICIENT_SIZE:
        return "Insufficient Size";
    default:
        return "Unknown Error";
    }
}

/* ---- the system ---- */

API int nvmlSystemGetDriverVersion(char *version, unsigned room)
{
    return put_text(version, room, DRIVER_VERSION);
}

API int nvmlSystemGetNVMLVersion(char *version, unsigned room)
{
    return put_text(version, room, GHOST_CUDA == 12 ? "12." DRIVER_VERSION : "13." DRIVER_VERSION);
}

API int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    *version = GHOST_RUNTIME_VERSION;
    return NVML_SUCCESS;
}

API int nvmlSystemGetCudaDriverVersion(int *version)
{
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

API int nvmlSystemGetProcessName(unsigned pid, char *name, unsigned room)
{
    return put_text(name, room, "ghost");
}

/* ---- finding a device ---- */

API int nvmlDeviceGetCount_v2(unsigned *count)
{
    *count = (unsigned)config()->devices;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetCount(unsigned *count)
{
    return nvmlDeviceGetCount_v2(count);
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device)
{
    return device_handle((int)index, device);
}

API int nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *device)
{
    return device_handle((int)index, device);
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char *text, nvmlDevice_t *device)
{
    unsigned domain, bus;
    if (sscanf(text, "%x:%x", &domain, &bus) != 2)
        return NVML_INVALID_ARGUMENT;
    return device_handle((int)bus - 1, device) == NVML_SUCCESS ? NVML_SUCCESS : NVML_NOT_FOUND;
}

API int nvmlDeviceGetHandleByPciBusId(const char *text, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByPciBusId_v2(text, device);
}

API int nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned room)
{
    char uuid[48];
    card_uuid_text(device->index, uuid);
    return put_text(text, room, uuid);
}

API int nvmlDeviceGetHandleByUUID(const char *text, nvmlDevice_t *device)
{
    for (int i = 0; i < config()->devices; i++) {
        char uuid[48];
        card_uuid_text(i, uuid);
        if (strcmp(uuid, text) == 0)
            return device_handle(i, device);
    }
    return NVML_NOT_FOUND;
}

API int nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index)
{
    *index = (unsigned)device->index;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned *minor)
{
    *minor = (unsigned)device->index;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned room)
{
    return put_text(name, room, config()->name);
}

API int nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    *major = config()->major;
    *minor = config()->minor;
    return NVML_SUCCESS;
}

struct pci_info {
    char legacy_bus_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

API int nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, struct pci_info *info)
{
    memset(info, 0, sizeof *info);
    info->bus = (unsigned)device->index + 1;
    snprintf(info->legacy_bus_id, sizeof info->legacy_bus_id, "0000:%02X:00.0", info->bus);
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", info->bus);
    return NVML_SUCCESS;
}

/* ---- memory ---- */

struct memory_info {
    unsigned long long total, free, used;
};

struct memory_info_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

static uint64_t free_bytes(nvmlDevice_t card)
{
    uint64_t total = config()->total_bytes, used = card_used(card->index);
    return used < total ? total - used : 0;
}

/* Version 1 counts what the driver keeps for itself as used, version 2 tells it apart. */
API int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, struct memory_info *info)
{
    info->total = config()->total_bytes + config()->reserved_bytes;
    info->free = free_bytes(device);
    info->used = info->total - info->free;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, struct memory_info_v2 *info)
{
    info->total = config()->total_bytes + config()->reserved_bytes;
    info->reserved = config()->reserved_bytes;
    info->free = free_bytes(device);
    info->used = config()->total_bytes - info->free;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, struct memory_info *info)
{
    *info = (struct memory_info){.total = 256 * MIB, .free = 255 * MIB, .used = MIB};
    return NVML_SUCCESS;
}

/* ---- processes ---- */

#define MAX_LISTED 64

struct process_info {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};

struct process_info_v1 {
    unsigned pid;
    unsigned long long used;
};

/* Those that hold something of the card; `size` is that of the caller's structure. */
static int list_processes(nvmlDevice_t device, unsigned *count, void *list, size_t size)
{
    struct card_process found[MAX_LISTED];
    int held = card_processes(device->index, found, MAX_LISTED);
    unsigned room = *count;
    *count = (unsigned)(held < MAX_LISTED ? held : MAX_LISTED);
    if (*count > room)
        return NVML_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < *count; i++) {
        struct process_info info = {(unsigned)found[i].process, found[i].bytes, ~0u, ~0u};
        memcpy((char *)list + i * size, &info, size);
    }
    return NVML_SUCCESS;
}

API int nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned *count, struct process_info_v1 *list)
{
    return list_processes(device, count, list, sizeof *list);
}

API int nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned *count, struct process_info *list)
{
    return list_processes(device, count, list, sizeof *list);
}

API int nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, struct process_info *list)
{
    return list_processes(device, count, list, sizeof *list);
}

API int nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned *count, struct process_info *list)
{
    *count = 0;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, struct process_info *list)
{
    *count = 0;
    return NVML_SUCCESS;
}

/* ---- how it is doing: idle ---- */

struct utilization {
    unsigned gpu, memory;
};

API int nvmlDeviceGetUtilizationRates(nvmlDevice_t device, struct utilization *rates)
{
    *rates = (struct utilization){0, 0};
    return NVML_SUCCESS;
}

enum { CLOCK_GRAPHICS, CLOCK_SM, CLOCK_MEMORY, CLOCK_VIDEO };

API int nvmlDeviceGetClockInfo(nvmlDevice_t device, int type, unsigned *megahertz)
{
    *megahertz = (unsigned)(type == CLOCK_MEMORY ? config()->memory_khz : config()->clock_khz) / 1000;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, int type, unsigned *megahertz)
{
    return nvmlDeviceGetClockInfo(device, type, megahertz);
}

API int nvmlDeviceGetClock(nvmlDevice_t device, int type, int which, unsigned *megahertz)
{
    return nvmlDeviceGetClockInfo(device, type, megahertz);
}

API int nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned *celsius)
{
    *celsius = 30;
    return NVML_SUCCESS;
}

struct temperature {
    unsigned version;
    int sensor, celsius;
};

API int nvmlDeviceGetTemperatureV(nvmlDevice_t device, struct temperature *temperature)
{
    temperature->celsius = 30;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned *milliwatts)
{
    *milliwatts = 0;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetNumGpuCores(nvmlDevice_t device, unsigned *cores)
{
    *cores = 128u * (unsigned)config()->multiprocessors;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetMemoryBusWidth(nvmlDevice_t device, unsigned *bits)
{
    *bits = (unsigned)config()->bus_bits;
    return NVML_SUCCESS;
}

/* ---- what we do not claim ---- */

API int nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending)
{
    *current = *pending = 0;
    return NVML_NOT_SUPPORTED;
}

/* Not part of an NVLink fabric: state 0.  The caller's version holds the size of its structure. */
API int nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, void *info)
{
    memset(info, 0, 28);
    return NVML_SUCCESS;
}

API int nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, unsigned *info)
{
    memset(info + 1, 0, (*info & 0xffffff) - sizeof *info);
    return NVML_SUCCESS;
}

API int nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, int *active)
{
    *active = 0;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned link, int *type)
{
    return NVML_NOT_SUPPORTED;
}

API int nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned link, struct pci_info *info)
{
    return NVML_NOT_SUPPORTED;
}

API int nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, unsigned link, int capability, unsigned *value)
{
    *value = 0;
    return NVML_NOT_SUPPORTED;
}
