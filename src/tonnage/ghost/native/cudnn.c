/* cuDNN: descriptors, the graph interface ("backend"), and how large things are.
 *
 * The graph interface is answered just far enough that a frontend builds a plan: every question for
 * candidates has one answer without notes or knobs, and a plan's own workspace, which only the closed
 * library knows, is 0 bytes and counted as unknown. */
#include "ghost.h"

#include <stdlib.h>
#include <string.h>

#define STATUS_SUCCESS 0

struct cudnnContext {
    cudaStream_t stream;
};
typedef struct cudnnContext *cudnnHandle_t;

API size_t cudnnGetVersion(void)
{
    return 92000;
}

API size_t cudnnGetMaxDeviceVersion(void)
{
    return (size_t)(config()->major * 100 + config()->minor * 10);
}

API size_t cudnnGetCudartVersion(void)
{
    return GHOST_RUNTIME_VERSION;
}

API const char *cudnnGetErrorString(int status)
{
    return status == STATUS_SUCCESS ? "CUDNN_STATUS_SUCCESS" : "CUDNN_STATUS_INTERNAL_ERROR";
}

API void cudnnGetLastErrorString(char *message, size_t room)
{
    if (room)
        message[0] = 0;
}

API int cudnnGetProperty(int property, int *value)
{
    const int parts[] = {9, 20, 0};
    *value = property >= 0 && property < 3 ? parts[property] : 0;
    return STATUS_SUCCESS;
}

API int cudnnCreate(cudnnHandle_t *handle)
{
    device_use(current_device);
    *handle = calloc(1, sizeof **handle);
    return STATUS_SUCCESS;
}

API int cudnnDestroy(cudnnHandle_t handle)
{
    free(handle);
    return STATUS_SUCCESS;
}

API int cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream)
{
    handle->stream = stream;
    return STATUS_SUCCESS;
}

API int cudnnGetStream(cudnnHandle_t handle, cudaStream_t *stream)
{
    *stream = handle->stream;
    return STATUS_SUCCESS;
}

/* ---- the graph interface ---- */

enum {
    ATTRIBUTE_HEURISTIC_RESULTS = 202,
    ATTRIBUTE_HEURISTIC_DEVICE = 204,
    ATTRIBUTE_CONFIG_INTERMEDIATE = 301,
    ATTRIBUTE_CONFIG_KNOBS = 302,
    ATTRIBUTE_PLAN_WORKSPACE = 402,
    ATTRIBUTE_PLAN_JSON = 405,
    ATTRIBUTE_ENGINE_COUNT = 802,
    ATTRIBUTE_LAYOUT_TYPES = 1101,
    ATTRIBUTE_ENGINE_KNOBS = 1302,
    ATTRIBUTE_ENGINE_NUMERICAL_NOTES = 1303,
    ATTRIBUTE_ENGINE_LAYOUTS = 1304,
    ATTRIBUTE_ENGINE_BEHAVIOUR_NOTES = 1305,
};
enum { TYPE_INT64 = 3, TYPE_VOID_POINTER = 6, TYPE_DESCRIPTOR = 15, TYPE_DOUBLE = 5, TYPE_CHAR = 24 };

/* What was set on a descriptor, so that it can be read again. */
struct attribute {
    struct attribute *next;
    int name, type;
    int64_t count;
    unsigned char data[];
};

struct descriptor {
    int type;
    struct attribute *attributes;
};

static size_t element_bytes(int type)
{
    static const int narrow[] = {1, 2, 4, 7, 8, 9, 10, 11, 12, 13, 14, 16, 17, 18, 19, 20, 21, 22, 23, 25, 27, 28, 29};
    for (size_t i = 0; i < sizeof narrow / sizeof *narrow; i++)
        if (narrow[i] == type)
            return type == 2 || type == TYPE_CHAR ? 1 : 4;
    return type == TYPE_CHAR ? 1 : 8;
}

API int cudnnBackendCreateDescriptor(int type, struct descriptor **descriptor)
{
    *descriptor = calloc(1, sizeof **descriptor);
    (*descriptor)->type = type;
    return STATUS_SUCCESS;
}

API int cudnnBackendDestroyDescriptor(struct descriptor *descriptor)
{
    for (struct attribute *next, *a = descriptor ? descriptor->attributes : NULL; a; a = next) {
        next = a->next;
        free(a);
    }
    free(descriptor);
    return STATUS_SUCCESS;
}

API int cudnnBackendSetAttribute(struct descriptor *descriptor, int name, int type, int64_t count,
                                 const void *elements)
{
    size_t bytes = (size_t)count * element_bytes(type);
    struct attribute *attribute = malloc(sizeof *attribute + bytes);
    *attribute = (struct attribute){descriptor->attributes, name, type, count};
    if (bytes && elements)
        memcpy(attribute->data, elements, bytes);
    descriptor->attributes = attribute;
    return STATUS_SUCCESS;
}

API int cudnnBackendFinalize(struct descriptor *descriptor)
{
    return STATUS_SUCCESS;
}

static bool empty_list(int name)
{
    return name == ATTRIBUTE_HEURISTIC_DEVICE || name == ATTRIBUTE_LAYOUT_TYPES || name == ATTRIBUTE_ENGINE_KNOBS ||
           name == ATTRIBUTE_CONFIG_INTERMEDIATE || name == ATTRIBUTE_CONFIG_KNOBS ||
           name == ATTRIBUTE_ENGINE_NUMERICAL_NOTES || name == ATTRIBUTE_ENGINE_LAYOUTS ||
           name == ATTRIBUTE_ENGINE_BEHAVIOUR_NOTES || name == ATTRIBUTE_PLAN_JSON;
}

API int cudnnBackendGetAttribute(struct descriptor *descriptor, int name, int type, int64_t wanted, int64_t *count,
                                 void *elements)
{
    for (const struct attribute *a = descriptor->attributes; a; a = a->next) {
        if (a->name != name || a->type != type)
            continue;
        int64_t copied = a->count < wanted ? a->count : wanted;
        if (elements && type != TYPE_DESCRIPTOR)
            memcpy(elements, a->data, (size_t)copied * element_bytes(type));
        if (count)
            *count = elements ? copied : a->count;
        return STATUS_SUCCESS;
    }
    int64_t available = empty_list(name) ? 0 : 1;
    if (count)
        *count = available;
    if (name == ATTRIBUTE_PLAN_WORKSPACE)
        unknown_workspace("cudnnBackend execution plan");
    if (elements && wanted > 0 && available && type != TYPE_DESCRIPTOR) {
        memset(elements, 0, element_bytes(type));
        if (name == ATTRIBUTE_ENGINE_COUNT)
            *(int64_t *)elements = 1;
    }
    return STATUS_SUCCESS;
}

API int cudnnBackendExecute(cudnnHandle_t handle, struct descriptor *plan, struct descriptor *pack)
{
    library_call("cudnnBackendExecute", 0, 0, 0, 0, 1, handle->stream);
    return STATUS_SUCCESS;
}
