/* cuDNN: descriptors, the graph interface ("backend"), and how large things are.
 *
 * The graph interface is answered just far enough that a frontend builds a plan: every question for
 * candidates has one answer without notes or knobs.  A plan's own workspace, which only the closed library
 * decides, is known for attention and for part of the convolutions (below); where it is not, the part that is
 * understood is given (else 0 bytes), and the plan is counted as unknown. */
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
    bool channels_last;
};

/* The tensors of an operation: of a reduction its input and output, of a convolution as named. */
enum { OPERAND_INPUT, OPERAND_OUTPUT };
enum { OPERAND_IMAGE, OPERAND_FILTER, OPERAND_RESULT, OPERANDS };

struct descriptor {
    int type;
    struct attribute *attributes;
    struct shape operands[OPERANDS];
    int64_t strides[3]; /* of a convolution */
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
    DESCRIPTOR_CONVOLUTION = 1,
    DESCRIPTOR_ENGINE = 2,
    DESCRIPTOR_ENGINE_CONFIG = 3,
    DESCRIPTOR_HEURISTICS = 4,
    OPERATION_CONVOLUTION_FORWARD = 10,
    OPERATION_CONVOLUTION_BACKWARD_FILTER = 11,
    OPERATION_CONVOLUTION_BACKWARD_DATA = 12,
    DESCRIPTOR_GRAPH = 15,
    DESCRIPTOR_TENSOR = 17,
    OPERATION_MATMUL = 19,
    OPERATION_REDUCTION = 22,
    OPERATION_SDPA_FORWARD = 41,
    OPERATION_SDPA_BACKWARD = 43,
};
enum {
    ATTRIBUTE_CONVOLUTION_STRIDES = 103,
    ATTRIBUTE_GRAPH_OPERATIONS = 801,
    ATTRIBUTE_TENSOR_DATA_TYPE = 901,
    ATTRIBUTE_TENSOR_SIZES = 902,
    ATTRIBUTE_TENSOR_STRIDES = 903,
};

/* Which operand an attribute sets. */
static const struct {
    int attribute, operand;
} roles[] = {
    {703, OPERAND_FILTER}, {704, OPERAND_IMAGE},   {705, OPERAND_RESULT}, /* forward: w, x, y */
    {709, OPERAND_FILTER}, {710, OPERAND_IMAGE},   {711, OPERAND_RESULT}, /* backward data: w, dx, dy */
    {715, OPERAND_FILTER}, {716, OPERAND_IMAGE},   {717, OPERAND_RESULT}, /* backward filter: dw, x, dy */
    {1610, OPERAND_INPUT}, {1611, OPERAND_OUTPUT},                        /* reduction */
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
    const struct attribute *strides = find_attribute(tensor, ATTRIBUTE_TENSOR_STRIDES);
    if (strides && strides->count > 1)
        shape.channels_last = ((const int64_t *)strides->data)[1] == 1 && shape.sizes[1] > 1;
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
    const struct shape *from = &operation->operands[OPERAND_INPUT], *to = &operation->operands[OPERAND_OUTPUT];
    if (operation->type != OPERATION_REDUCTION || from->rank != 4 || to->rank != 4 || from->sizes[1] == to->sizes[1])
        return 0;
    return from->sizes[0] * from->sizes[1] * from->sizes[2] * from->sizes[3] * data_type_bytes(to->data_type);
}

/* ---- the workspace of convolutions ----
 *
 * Read off an H200 with cuDNN 9.19 (the same file, operations "conv", 6 shapes in bf16 and fp32).  Its kernels want
 * channels last: for images that come channels first, the workspace holds such copies of image, filter and result,
 * and 16 bytes.  In copies, the channels of image and filter are rounded up to 16 bytes; a 1x1 filter needs none.
 * The rule came from two shapes; on the others it is right to the byte, or within 131 bytes for the 1-D one, for
 * every 16-bit forward and every backward to the image without stride.  Counted as unknown: fp32 forward (two of
 * four shapes leave one copy or the rounding out), backward to the image with a stride (none in fp32, nor where
 * the stride is the filter's size), and backward to the filter, which adds to its copies as many partial sums as
 * its heuristics like (none to 60 filters in fp32). */

#define CONVOLUTION_WORKSPACE_BYTES 16

static int64_t copy_bytes(const struct shape *tensor, bool rounded)
{
    int64_t width = data_type_bytes(tensor->data_type), bytes = width;
    for (int i = 0; i < tensor->rank; i++) {
        int64_t size = tensor->sizes[i], step = 16 / width;
        bytes *= i == 1 && rounded ? (size + step - 1) / step * step : size;
    }
    return bytes;
}

static bool is_convolution(int type)
{
    return type >= OPERATION_CONVOLUTION_FORWARD && type <= OPERATION_CONVOLUTION_BACKWARD_DATA;
}

static void find_convolution_workspace(struct descriptor *graph, const struct descriptor *operation)
{
    const struct shape *image = &operation->operands[OPERAND_IMAGE], *filter = &operation->operands[OPERAND_FILTER];
    const struct shape *result = &operation->operands[OPERAND_RESULT];
    bool narrow = data_type_bytes(image->data_type) == 2, forward = operation->type == OPERATION_CONVOLUTION_FORWARD;
    bool to_image = operation->type == OPERATION_CONVOLUTION_BACKWARD_DATA;
    bool pointwise = true, strided = false, tiling = true;
    for (int i = 2; i < filter->rank && i < 5; i++) {
        pointwise &= filter->sizes[i] == 1;
        strided |= operation->strides[i - 2] > 1;
        tiling &= operation->strides[i - 2] == filter->sizes[i];
    }
    bool covered = image->rank == 4 && !image->channels_last && image->sizes[1] == filter->sizes[1];
    graph->workspace_known = covered && (forward ? narrow : to_image && !strided && !pointwise);
    if (covered && !pointwise && !(to_image && (tiling || (strided && !narrow))))
        graph->workspace_bytes = CONVOLUTION_WORKSPACE_BYTES + copy_bytes(image, true) + copy_bytes(filter, true) +
                                 copy_bytes(result, false);
}

static void find_workspace(struct descriptor *graph, struct descriptor *const *operations, int64_t count)
{
    int products = 0;
    int64_t bytes = ATTENTION_WORKSPACE_BYTES;
    if (count == 1 && is_convolution(operations[0]->type)) {
        find_convolution_workspace(graph, operations[0]);
        return;
    }
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
        for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
            if (roles[i].attribute == name)
                descriptor->operands[roles[i].operand] = shape_of(other);
        break;
    case DESCRIPTOR_CONVOLUTION: {
        const struct attribute *strides = find_attribute(other, ATTRIBUTE_CONVOLUTION_STRIDES);
        if (strides && strides->count <= 3)
            memcpy(descriptor->strides, strides->data, (size_t)strides->count * sizeof *descriptor->strides);
        break;
    }
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
