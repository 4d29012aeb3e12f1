/* Settings: GHOST_* of the environment, read once at the first call; ghost_set changes them until a device
 * has been used, so that a process can be forked first and told afterwards which card it has. */
#include "ghost.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct config settings = {
    .devices = 1,
    .total_bytes = 85029158912ull, /* an 80 GB H100 as its driver reports it */
    .name = "NVIDIA H100 80GB HBM3",
    .major = 9,
    .multiprocessors = 132,
    .threads_per_multiprocessor = 2048,
    .l2_bytes = 52428800,
    .shared_per_block_bytes = 232448,
    .shared_per_multiprocessor_bytes = 233472,
    .registers_per_multiprocessor = 65536,
    .bus_bits = 5120,
    .memory_khz = 2619000,
    .clock_khz = 1980000,
    .real_ranks = 1,
    .timeout_seconds = 600,
};
static bool reserved_given;

static bool set_text(char *target, size_t size, const char *value)
{
    return (size_t)snprintf(target, size, "%s", value) < size;
}

static bool set_number(uint64_t *target, const char *value)
{
    char *end;
    uint64_t number = strtoull(value, &end, 10);
    if (end == value || *end)
        return false;
    *target = number;
    return true;
}

static bool set_int(int *target, const char *value)
{
    uint64_t number;
    if (!set_number(&number, value) || number > INT32_MAX)
        return false;
    *target = (int)number;
    return true;
}

static bool set_flag(bool *target, const char *value)
{
    *target = strcmp(value, "0") != 0;
    return true;
}

static bool set_capability(const char *value)
{
    int major, minor;
    char rest;
    if (sscanf(value, "%d.%d%c", &major, &minor, &rest) != 2)
        return false;
    settings.major = major;
    settings.minor = minor;
    return true;
}

static bool set_devices(const char *value)
{
    int devices;
    if (!set_int(&devices, value) || devices > MAX_DEVICES)
        return false;
    settings.devices = devices;
    devices_changed();
    return true;
}

/* `2:464519168,8:566231040`: bytes of a communicator by its number of ranks, ascending. */
static bool set_nccl(const char *value)
{
    int count = 0, length;
    unsigned long long bytes;
    while (count < MAX_NCCL_SIZES && sscanf(value, "%d:%llu%n", &settings.nccl[count].ranks, &bytes, &length) == 2) {
        settings.nccl[count++].bytes = bytes;
        value += length;
        value += *value == ',';
    }
    settings.nccl_sizes = *value ? 0 : count;
    return !*value;
}

static bool set_events(const char *value)
{
    settings.lazy_events = strcmp(value, "lazy") == 0;
    settings.immediate_events = strcmp(value, "immediate") == 0;
    return settings.lazy_events || settings.immediate_events || strcmp(value, "soon") == 0;
}

static bool apply(const char *key, const char *value)
{
    struct config *s = &settings;
    struct {
        const char *key;
        int *target;
    } numbers[] = {
        {"SMS", &s->multiprocessors},
        {"THREADS_PER_SM", &s->threads_per_multiprocessor},
        {"L2_BYTES", &s->l2_bytes},
        {"SHARED_PER_BLOCK_BYTES", &s->shared_per_block_bytes},
        {"SHARED_PER_SM_BYTES", &s->shared_per_multiprocessor_bytes},
        {"REGISTERS_PER_SM", &s->registers_per_multiprocessor},
        {"BUS_BITS", &s->bus_bits},
        {"MEMORY_KHZ", &s->memory_khz},
        {"CLOCK_KHZ", &s->clock_khz},
        {"NCCL_PEERS", &s->nccl_peers},
        {"REAL_RANKS", &s->real_ranks},
        {"TIMEOUT_SECONDS", &s->timeout_seconds},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (strcmp(key, numbers[i].key) == 0)
            return set_int(numbers[i].target, value);
    if (strcmp(key, "DEVICES") == 0)
        return set_devices(value);
    if (strcmp(key, "TOTAL_BYTES") == 0)
        return set_number(&s->total_bytes, value);
    if (strcmp(key, "CONTEXT_BYTES") == 0)
        return set_number(&s->context_bytes, value);
    if (strcmp(key, "NCCL_BYTES") == 0)
        return set_nccl(value);
    if (strcmp(key, "NCCL_PEER_BYTES") == 0)
        return set_number(&s->nccl_peer_bytes, value);
    if (strcmp(key, "GRAPH_BYTES") == 0)
        return set_number(&s->graph_bytes, value);
    if (strcmp(key, "RESERVED_BYTES") == 0)
        return reserved_given = set_number(&s->reserved_bytes, value);
    if (strcmp(key, "NAME") == 0)
        return set_text(s->name, sizeof s->name, value);
    if (strcmp(key, "CAPABILITY") == 0)
        return set_capability(value);
    if (strcmp(key, "EVENTS") == 0)
        return set_events(value);
    if (strcmp(key, "LOG") == 0)
        return set_flag(&s->log, value);
    if (strcmp(key, "REPORT") == 0)
        return set_text(s->report, sizeof s->report, value);
    if (strcmp(key, "SHM") == 0)
        return set_text(s->shm, sizeof s->shm, value);
    if (strcmp(key, "CARDS") == 0)
        return set_text(s->cards, sizeof s->cards, value);
    return false;
}

/* Unless told, NVML's total is the driver's, rounded up to whole GiB: cards are sold in those, and the
 * difference is what the driver keeps for itself (an A100-80GB, a T4: exactly so). */
static void derive(void)
{
    if (!reserved_given)
        settings.reserved_bytes = (GIB - settings.total_bytes % GIB) % GIB;
}

static void read_environment(void)
{
    static const char *const keys[] = {
        "DEVICES",      "TOTAL_BYTES",  "CONTEXT_BYTES",    "RESERVED_BYTES", "NAME",      "CAPABILITY",
        "SMS",          "THREADS_PER_SM", "L2_BYTES",       "SHARED_PER_BLOCK_BYTES",      "SHARED_PER_SM_BYTES",
        "REGISTERS_PER_SM", "BUS_BITS", "MEMORY_KHZ",       "CLOCK_KHZ",      "EVENTS",    "LOG",
        "REPORT",       "SHM",          "CARDS",            "REAL_RANKS",     "TIMEOUT_SECONDS",
        "NCCL_BYTES",   "NCCL_PEER_BYTES", "NCCL_PEERS",    "GRAPH_BYTES",
    };
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        char variable[64];
        snprintf(variable, sizeof variable, "GHOST_%s", keys[i]);
        const char *value = getenv(variable);
        if (value && *value && !apply(keys[i], value))
            fprintf(stderr, "ghost: %s=%s is not understood and is ignored\n", variable, value);
    }
    derive();
}

const struct config *config(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    static bool ready;
    if (!__atomic_load_n(&ready, __ATOMIC_ACQUIRE)) {
        pthread_once(&once, read_environment);
        __atomic_store_n(&ready, true, __ATOMIC_RELEASE);
    }
    return &settings;
}

/* Puts back in front what `PYTHONPATH=src python train.py`, in a script of the shell, has left out: without the ghost's
 * folders Python would take the torch that is installed.  Before Python reads it, which is after all constructors. */
static void restore_python_path(void)
{
    const char *ours = getenv("GHOST_PYTHONPATH"), *now = getenv("PYTHONPATH");
    if (!ours || !*ours || (now && strstr(now, ours)))
        return;
    size_t size = strlen(ours) + (now ? strlen(now) : 0) + 2;
    char *both = malloc(size);
    if (!both)
        return;
    snprintf(both, size, now && *now ? "%s:%s" : "%s", ours, now);
    setenv("PYTHONPATH", both, 1);
    free(both);
}

/* At the start of the process: a program may clear its environment before it uses a GPU. */
__attribute__((constructor)) static void read_at_start(void)
{
    config();
    restore_python_path();
}

/* Changes one setting.  0: done; 1: unknown key or bad value; 2: too late, a device is in use. */
API int ghost_set(const char *key, const char *value)
{
    config();
    bool any_time = strcmp(key, "LOG") == 0 || strcmp(key, "REPORT") == 0 || strcmp(key, "EVENTS") == 0 ||
                    strcmp(key, "REAL_RANKS") == 0; /* processes that a program spawns learn it late */
    if (device_any_active() && !any_time)
        return 2;
    if (!apply(key, value))
        return 1;
    derive();
    return 0;
}
