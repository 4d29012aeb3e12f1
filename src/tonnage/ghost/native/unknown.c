/* What is not modelled: counted calls of generated stubs, workspaces we cannot know, and the report. */
#define _GNU_SOURCE
#include "ghost.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SPARE_STUBS 256
#define MAX_LIBRARIES 64
#define MAX_WORKSPACES 256

/* One generated library: the names of its stubs and how often each was called. */
static struct {
    const char *library;
    const char *const *names;
    const uint64_t *calls;
    size_t count;
} libraries[MAX_LIBRARIES];
static size_t library_count;

static struct {
    char *name;
    uint64_t calls;
} spares[SPARE_STUBS], workspaces[MAX_WORKSPACES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Called by each generated library when it is loaded. */
API void ghost_register_stubs(const char *library, const char *const *names, const uint64_t *calls, size_t count)
{
    pthread_mutex_lock(&lock);
    if (library_count < MAX_LIBRARIES) {
        libraries[library_count].library = library;
        libraries[library_count].names = names;
        libraries[library_count].calls = calls;
        libraries[library_count++].count = count;
    }
    pthread_mutex_unlock(&lock);
}

/* ---- what stubs hand out ---- */

/* A fresh handle of 4 KiB of zeros: enough for whoever looks inside one. */
API void *ghost_new_handle(void)
{
    return calloc(1, 4096);
}

void *dummy_handle(void)
{
    return ghost_new_handle();
}

API void ghost_store4(void *pointer, uint32_t value)
{
    if (pointer && !is_device_address(pointer))
        memcpy(pointer, &value, sizeof value);
}

API void ghost_store8(void *pointer, uint64_t value)
{
    if (pointer && !is_device_address(pointer))
        memcpy(pointer, &value, sizeof value);
}

/* ---- functions nobody has heard of, asked for by name ---- */

static int spare_call(int i)
{
    __atomic_fetch_add(&spares[i].calls, 1, __ATOMIC_RELAXED);
    return 0;
}

#define SPARE(i)                                                                                                  \
    static int spare_##i(void)                                                                                    \
    {                                                                                                             \
        return spare_call(0x##i);                                                                                 \
    }
#define SPARES(high) \
    SPARE(high##0) SPARE(high##1) SPARE(high##2) SPARE(high##3) SPARE(high##4) SPARE(high##5) SPARE(high##6) SPARE(high##7) \
    SPARE(high##8) SPARE(high##9) SPARE(high##a) SPARE(high##b) SPARE(high##c) SPARE(high##d) SPARE(high##e) SPARE(high##f)
#define NAMES(high) \
    spare_##high##0, spare_##high##1, spare_##high##2, spare_##high##3, spare_##high##4, spare_##high##5, spare_##high##6, \
        spare_##high##7, spare_##high##8, spare_##high##9, spare_##high##a, spare_##high##b, spare_##high##c, spare_##high##d, \
        spare_##high##e, spare_##high##f

SPARES(0) SPARES(1) SPARES(2) SPARES(3) SPARES(4) SPARES(5) SPARES(6) SPARES(7)
SPARES(8) SPARES(9) SPARES(a) SPARES(b) SPARES(c) SPARES(d) SPARES(e) SPARES(f)

static int (*const spare_functions[SPARE_STUBS])(void) = {
    NAMES(0), NAMES(1), NAMES(2), NAMES(3), NAMES(4), NAMES(5), NAMES(6), NAMES(7),
    NAMES(8), NAMES(9), NAMES(a), NAMES(b), NAMES(c), NAMES(d), NAMES(e), NAMES(f),
};

void *spare_stub(const char *name)
{
    void *stub = NULL;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < SPARE_STUBS && !stub; i++) {
        if (!spares[i].name)
            spares[i].name = strdup(name);
        if (strcmp(spares[i].name, name) == 0)
            stub = (void *)spare_functions[i];
    }
    pthread_mutex_unlock(&lock);
    return stub;
}

void unknown_workspace(const char *name)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_WORKSPACES; i++) {
        if (!workspaces[i].name)
            workspaces[i].name = strdup(name);
        if (strcmp(workspaces[i].name, name) == 0) {
            workspaces[i].calls++;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
}

/* ---- as text ---- */

struct text {
    char *at;
    size_t room, length; /* length of the whole text, also of what did not fit */
};

static void put(struct text *text, const char *part)
{
    size_t size = strlen(part);
    if (text->length + size < text->room)
        memcpy(text->at + text->length, part, size + 1);
    text->length += size;
}

static void put_count(struct text *text, bool *first, const char *library, const char *name, uint64_t calls)
{
    char number[32];
    snprintf(number, sizeof number, "\": %llu", (unsigned long long)calls);
    put(text, *first ? "\"" : ", \"");
    put(text, library);
    put(text, ":");
    put(text, name);
    put(text, number);
    *first = false;
}

/* Generated stubs that answer a question about a workspace with 0 bytes are told apart by their names. */
static bool asks_for_workspace(const char *name)
{
    return strcasestr(name, "bufferSize") || strcasestr(name, "Workspace") || strcasestr(name, "ReserveSpace") ||
           strstr(name, "TempSpace") || strstr(name, "StatesSize");
}

static void put_calls(struct text *text, bool about_workspaces)
{
    bool first = true;
    put(text, "{");
    for (size_t l = 0; l < library_count; l++)
        for (size_t i = 0; i < libraries[l].count; i++)
            if (libraries[l].calls[i] && asks_for_workspace(libraries[l].names[i]) == about_workspaces)
                put_count(text, &first, libraries[l].library, libraries[l].names[i], libraries[l].calls[i]);
    for (int i = 0; i < SPARE_STUBS && !about_workspaces; i++)
        if (spares[i].calls)
            put_count(text, &first, "by name", spares[i].name, spares[i].calls);
    for (int i = 0; i < MAX_WORKSPACES && about_workspaces; i++)
        if (workspaces[i].calls)
            put_count(text, &first, "modelled", workspaces[i].name, workspaces[i].calls);
    put(text, "}");
}

/* Calls of functions that are not modelled, as a JSON object {"library:function": count}.  Returns the length
 * of the whole text; with less room than that plus one, `json` holds a part that ends anywhere. */
API size_t ghost_unknown_calls(char *json, size_t room)
{
    struct text text = {json, room, 0};
    put_calls(&text, false);
    return text.length;
}

/* The same for workspaces whose true size is not known; they count 0 bytes. */
API size_t ghost_unknown_workspaces(char *json, size_t room)
{
    struct text text = {json, room, 0};
    put_calls(&text, true);
    return text.length;
}

/* ---- the report: one line of JSON appended to a file ---- */

static size_t compose(char *json, size_t room)
{
    struct text text = {json, room, 0};
    char part[256];
    snprintf(part, sizeof part,
             "{\"pid\": %d, \"launches\": %llu, \"pinned_peak_bytes\": %llu, \"managed_bytes\": %llu, "
             "\"device_peak_bytes\": [",
             getpid(), (unsigned long long)ghost_launches(), (unsigned long long)ghost_pinned_peak_bytes(),
             (unsigned long long)ghost_managed_bytes());
    put(&text, part);
    for (int device = 0; device < device_count(); device++) {
        snprintf(part, sizeof part, "%s%llu", device ? ", " : "", (unsigned long long)ghost_device_peak(device));
        put(&text, part);
    }
    put(&text, "], \"unknown_calls\": ");
    put_calls(&text, false);
    put(&text, ", \"unknown_workspaces\": ");
    put_calls(&text, true);
    put(&text, "}\n");
    return text.length;
}

/* Appends this process's line to the report file of the settings.  0: done, -1: no file or not writable. */
API int ghost_report(void)
{
    const char *path = config()->report;
    if (!*path)
        return -1;
    size_t length = compose(NULL, 0);
    char *json = malloc(length + 1);
    compose(json, length + 1);
    int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    ssize_t written = file < 0 ? -1 : write(file, json, length); /* one write: lines of processes do not mix */
    if (file >= 0)
        close(file);
    free(json);
    return written == (ssize_t)length ? 0 : -1;
}

__attribute__((destructor)) static void report_at_exit(void)
{
    if (device_process() == getpid()) /* not in children that were forked later and use no device */
        ghost_report();
}

/* ---- driver functions by name ---- */

/* Functions that changed their arguments keep one name for those who ask by name: which variant is meant
 * depends on the CUDA version asked for (cuda.h's macros and cudaTypedefs.h say which). */
static const struct {
    const char *name;
    int since;
    const char *variant;
} variants[] = {
    {"cuGetProcAddress", 12000, "cuGetProcAddress_v2"},
    {"cuCtxCreate", 13000, "cuCtxCreate_v4"},
    {"cuCtxCreate", 3020, "cuCtxCreate_v2"},
    {"cuMemPrefetchAsync", 12020, "cuMemPrefetchAsync_v2"},
    {"cuMemAdvise", 12020, "cuMemAdvise_v2"},
    {"cuStreamGetCaptureInfo", 12030, "cuStreamGetCaptureInfo_v3"},
    {"cuStreamGetCaptureInfo", 11030, "cuStreamGetCaptureInfo_v2"},
    {"cuEventElapsedTime", 12080, "cuEventElapsedTime_v2"},
    {"cuDeviceGetUuid", 11040, "cuDeviceGetUuid_v2"},
};

static void *lookup(const char *name)
{
    static void *driver;
    if (!driver)
        driver = dlopen("libcuda.so.1", RTLD_LAZY);
    return driver ? dlsym(driver, name) : NULL;
}

void *driver_symbol(const char *name, int version)
{
    char longer[256];
    void *symbol = NULL;
    for (size_t i = 0; i < sizeof variants / sizeof *variants && !symbol; i++)
        if (strcmp(variants[i].name, name) == 0 && version >= variants[i].since)
            symbol = lookup(variants[i].variant);
    for (int v = 3; v >= 2 && !symbol; v--) {
        bool changed = false;
        for (size_t i = 0; i < sizeof variants / sizeof *variants; i++)
            changed |= strcmp(variants[i].name, name) == 0;
        if (changed)
            break;
        snprintf(longer, sizeof longer, "%s_v%d", name, v);
        symbol = lookup(longer);
    }
    if (!symbol)
        symbol = lookup(name);
    return symbol ? symbol : spare_stub(name);
}
