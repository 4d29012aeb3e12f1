/* cuDNN: descriptors, the graph interface ("backend"), and how large things are.
 *
 * The graph interface is answered just far enough that a frontend builds a plan: every question for
 * candidates has one answer without notes or knobs.  A plan's own workspace, which only the closed library
 * decides, is known for attention (below); of other graphs it is 0 bytes and counted as unknown. */
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

/* A tensor as an operation met it: descriptors may be gone before the graph is asked for its workspace. */
struct shape {
    int64_t sizes[8];
    int rank;
    int data_type;
};

struct descriptor {
    int type;
    struct attribute *attributes;
    struct shape reduced, result; /* of a reduction */
    bool workspace_known;
    int64_t workspace_bytes; /* of a graph, and of what is made from it */
};

static size_t element_bytes(int type)
{
    static const int narrow[] = {1, 2, 4, 7, 8, 9, 10, 11, 12, 13, 14, 16, 17, 18, 19, 20, 21, 22, 23, 25, 27, 28, 29};
    for (size_t i = 0; i < sizeof narrow / sizeof *narrow; i++)
        if (narrow[i] == type)
            return type == 2 || type == TYPE_CHAR ? 1 : 4;
    return type == TYPE_CHAR ? 1 : 8;
}

/* ---- the workspace of attention ----
 *
 * Read off an H200 with cuDNN 9.19 (measurements/h200-2026-11-20.jsonl, operations "sdpa cudnn", 13 shapes
 * forward and backward, all equal): 256 bytes; and where groups of queries share keys and values, their
 * gradients are first written for every query head, in the tensors' own type, and then added up by a
 * reduction over the heads.  The accumulators of dQ are the frontend's own and not part of this. */

enum {
    DESCRIPTOR_ENGINE = 2,
    DESCRIPTOR_ENGINE_CONFIG = 3,
    DESCRIPTOR_HEURISTICS = 4,
    DESCRIPTOR_GRAPH = 15,
    DESCRIPTOR_TENSOR = 17,
    OPERATION_MATMUL = 19,
    OPERATION_REDUCTION = 22,
    OPERATION_SDPA_FORWARD = 41,
    OPERATION_SDPA_BACKWARD = 43,
};
enum {
    ATTRIBUTE_GRAPH_OPERATIONS = 801,
    ATTRIBUTE_TENSOR_DATA_TYPE = 901,
    ATTRIBUTE_TENSOR_SIZES = 902,
    ATTRIBUTE_REDUCTION_INPUT = 1610,
    ATTRIBUTE_REDUCTION_OUTPUT = 1611,
};

#define ATTENTION_WORKSPACE_BYTES 256

static const struct attribute *find_attribute(const struct descriptor *descriptor, int name)
{
    const struct attribute *a = descriptor->attributes;
    while (a && a->name != name)
        a = a->next;
    return a;
}

static struct shape shape_of(const struct descriptor *tensor)
{
    struct shape shape = {0};
    const struct attribute *type = find_attribute(tensor, ATTRIBUTE_TENSOR_DATA_TYPE);
    const struct attribute *sizes = find_attribute(tensor, ATTRIBUTE_TENSOR_SIZES);
    if (type)
        memcpy(&shape.data_type, type->data, sizeof shape.data_type);
    if (sizes && sizes->count <= 8) {
        shape.rank = (int)sizes->count;
        memcpy(shape.sizes, sizes->data, (size_t)sizes->count * sizeof *shape.sizes);
    }
    return shape;
}

static int64_t data_type_bytes(int type)
{
    enum { FLOAT = 0, DOUBLE = 1, HALF = 2, BFLOAT16 = 9 };
    return type == DOUBLE ? 8 : type == FLOAT ? 4 : type == HALF || type == BFLOAT16 ? 2 : 1;
}

/* Bytes of the input of a reduction over heads: (batch, heads, length, width) to fewer heads. */
static int64_t expanded_heads_bytes(const struct descriptor *operation)
{
    const struct shape *from = &operation->reduced, *to = &operation->result;
    if (operation->type != OPERATION_REDUCTION || from->rank != 4 || to->rank != 4 || from->sizes[1] == to->sizes[1])
        return 0;
    return from->sizes[0] * from->sizes[1] * from->sizes[2] * from->sizes[3] * data_type_bytes(to->data_type);
}

static void find_workspace(struct descriptor *graph, struct descriptor *const *operations, int64_t count)
{
    int products = 0;
    int64_t bytes = ATTENTION_WORKSPACE_BYTES;
    for (int64_t i = 0; i < count; i++) {
        int type = operations[i]->type;
        products += type == OPERATION_MATMUL;
        products += type == OPERATION_SDPA_FORWARD || type == OPERATION_SDPA_BACKWARD ? 2 : 0;
        bytes += expanded_heads_bytes(operations[i]);
    }
    graph->workspace_known = products >= 2;
    graph->workspace_bytes = graph->workspace_known ? bytes : 0;
}

/* What `descriptor` learns from a descriptor that is set on it. */
static void learn(struct descriptor *descriptor, int name, const struct descriptor *other)
{
    switch (other->type) {
    case DESCRIPTOR_TENSOR:
        if (name == ATTRIBUTE_REDUCTION_INPUT)
            descriptor->reduced = shape_of(other);
        if (name == ATTRIBUTE_REDUCTION_OUTPUT)
            descriptor->result = shape_of(other);
        break;
    case DESCRIPTOR_GRAPH:
    case DESCRIPTOR_HEURISTICS:
    case DESCRIPTOR_ENGINE:
    case DESCRIPTOR_ENGINE_CONFIG:
        descriptor->workspace_known = other->workspace_known;
        descriptor->workspace_bytes = other->workspace_bytes;
        break;
    }
}

/* ---- descriptors ---- */

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
    if (type == TYPE_DESCRIPTOR && elements) {
        struct descriptor *const *others = elements;
        if (name == ATTRIBUTE_GRAPH_OPERATIONS)
            find_workspace(descriptor, others, count);
        else if (count == 1 && others[0])
            learn(descriptor, name, others[0]);
    }
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
    if (name == ATTRIBUTE_HEURISTIC_RESULTS && elements && wanted > 0)
        learn(*(struct descriptor **)elements, name, descriptor);
    if (name == ATTRIBUTE_PLAN_WORKSPACE) {
        if (elements && wanted > 0)
            *(int64_t *)elements = descriptor->workspace_bytes;
        if (!descriptor->workspace_known)
            unknown_workspace("cudnnBackend execution plan");
        return STATUS_SUCCESS;
    }
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
