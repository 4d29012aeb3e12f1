/* cuDNN's tensor descriptors and recurrent networks: how many weights a network has and where each lies, and what it
 * keeps from forward to backward.
 *
 * The order of the parts is ours (all matrices, then all biases); sizes follow from the documented equations. */
#include "ghost.h"

#include <stdlib.h>
#include <string.h>

#define STATUS_SUCCESS 0
#define MAX_DIMENSIONS 8

struct tensor {
    int type, count, sizes[MAX_DIMENSIONS], strides[MAX_DIMENSIONS];
};

API int cudnnCreateTensorDescriptor(struct tensor **tensor)
{
    *tensor = calloc(1, sizeof **tensor);
    return STATUS_SUCCESS;
}

API int cudnnDestroyTensorDescriptor(struct tensor *tensor)
{
    free(tensor);
    return STATUS_SUCCESS;
}

API int cudnnSetTensorNdDescriptor(struct tensor *tensor, int type, int count, const int *sizes, const int *strides)
{
    tensor->type = type;
    tensor->count = count < MAX_DIMENSIONS ? count : MAX_DIMENSIONS;
    memcpy(tensor->sizes, sizes, sizeof(int) * (size_t)tensor->count);
    memcpy(tensor->strides, strides, sizeof(int) * (size_t)tensor->count);
    return STATUS_SUCCESS;
}

API int cudnnGetTensorNdDescriptor(const struct tensor *tensor, int wanted, int *type, int *count, int *sizes,
                                   int *strides)
{
    int given = wanted < tensor->count ? wanted : tensor->count;
    *type = tensor->type;
    *count = tensor->count;
    if (sizes)
        memcpy(sizes, tensor->sizes, sizeof(int) * (size_t)given);
    if (strides)
        memcpy(strides, tensor->strides, sizeof(int) * (size_t)given);
    return STATUS_SUCCESS;
}

/* ---- recurrent networks ---- */

enum { CELL_RELU, CELL_TANH, CELL_LSTM, CELL_GRU };
enum { BIAS_NONE, BIAS_INPUT, BIAS_BOTH, BIAS_RECURRENT };

struct network {
    int cell, bias, directions, skip_input, type;
    int input, hidden, projection, layers;
};

API int cudnnCreateRNNDescriptor(struct network **network)
{
    *network = calloc(1, sizeof **network);
    return STATUS_SUCCESS;
}

API int cudnnDestroyRNNDescriptor(struct network *network)
{
    free(network);
    return STATUS_SUCCESS;
}

API int cudnnSetRNNDescriptor_v8(struct network *network, int algorithm, int cell, int bias, int direction, int input_mode,
                                 int type, int precision, int math, int32_t input, int32_t hidden, int32_t projection,
                                 int32_t layers, void *dropout, uint32_t flags)
{
    *network = (struct network){
        .cell = cell, .bias = bias, .directions = direction ? 2 : 1, .skip_input = input_mode, .type = type,
        .input = input, .hidden = hidden, .projection = projection, .layers = layers};
    return STATUS_SUCCESS;
}

static int gates(const struct network *n)
{
    return n->cell == CELL_LSTM ? 4 : n->cell == CELL_GRU ? 3 : 1;
}

/* cudnnDataType: float 0, double 1, half 2, bfloat16 9. */
static size_t element_bytes(const struct network *n)
{
    return n->type == 1 ? 8 : n->type == 0 ? 4 : 2;
}

static bool projected(const struct network *n)
{
    return n->cell == CELL_LSTM && n->projection > 0 && n->projection != n->hidden;
}

/* Rows and columns of matrix `id` of a pseudo layer: ids below `gates` read the input, the next as many the
 * recurrent state, the one after those projects.  False: there is no such matrix. */
static bool matrix(const struct network *n, int pseudo_layer, int id, int *rows, int *columns)
{
    int count = gates(n), output = projected(n) ? n->projection : n->hidden;
    bool first = pseudo_layer / n->directions == 0;
    *rows = n->hidden;
    if (id < count)
        *columns = first ? n->input : output * n->directions;
    else if (id < 2 * count)
        *columns = output;
    else
        *rows = output, *columns = n->hidden;
    return !(id < count && first && n->skip_input) && (id < 2 * count || (id == 2 * count && projected(n)));
}

static bool has_bias(const struct network *n, int id)
{
    if (id >= 2 * gates(n) || n->bias == BIAS_NONE)
        return false;
    return n->bias == BIAS_BOTH || (n->bias == BIAS_INPUT) == (id < gates(n));
}

/* Elements before matrix `id` of a pseudo layer; with `id` past the end of the last layer: of all matrices. */
static size_t matrix_offset(const struct network *n, int pseudo_layer, int id)
{
    size_t offset = 0;
    for (int layer = 0; layer <= pseudo_layer; layer++)
        for (int i = 0; i <= 2 * gates(n); i++) {
            int rows, columns;
            if (layer == pseudo_layer && i == id)
                return offset;
            if (matrix(n, layer, i, &rows, &columns))
                offset += (size_t)rows * (size_t)columns;
        }
    return offset;
}

static size_t bias_offset(const struct network *n, int pseudo_layer, int id)
{
    size_t offset = 0;
    for (int layer = 0; layer <= pseudo_layer; layer++)
        for (int i = 0; i < 2 * gates(n); i++) {
            if (layer == pseudo_layer && i == id)
                return offset;
            offset += has_bias(n, i) ? (size_t)n->hidden : 0;
        }
    return offset;
}

API int cudnnGetRNNWeightSpaceSize(void *handle, const struct network *n, size_t *bytes)
{
    int last = n->layers * n->directions - 1, past = 2 * gates(n) + 1;
    *bytes = (matrix_offset(n, last, past) + bias_offset(n, last, past)) * element_bytes(n);
    return STATUS_SUCCESS;
}

static void describe(struct tensor *tensor, int type, int rows, int columns)
{
    if (!tensor)
        return;
    *tensor = (struct tensor){.type = type, .count = 3, .sizes = {1, rows, columns}, .strides = {rows * columns, columns, 1}};
}

API int cudnnGetRNNWeightParams(void *handle, const struct network *n, int32_t pseudo_layer, size_t bytes,
                                const void *weights, int32_t id, struct tensor *matrix_tensor, void **matrix_address,
                                struct tensor *bias_tensor, void **bias_address)
{
    int rows, columns, last = n->layers * n->directions - 1, past = 2 * gates(n) + 1;
    size_t matrices = matrix_offset(n, last, past);
    bool here = matrix(n, pseudo_layer, id, &rows, &columns), bias = has_bias(n, id);
    char *start = (char *)weights;
    if (matrix_address)
        *matrix_address = here ? start + matrix_offset(n, pseudo_layer, id) * element_bytes(n) : NULL;
    if (here)
        describe(matrix_tensor, n->type, rows, columns);
    if (bias_address)
        *bias_address = bias ? start + (matrices + bias_offset(n, pseudo_layer, id)) * element_bytes(n) : NULL;
    if (bias)
        describe(bias_tensor, n->type, n->hidden, 1);
    return STATUS_SUCCESS;
}

/* ---- sequences, and what is kept of them ---- */

enum { MODE_INFERENCE, MODE_TRAINING };

struct sequences {
    int steps, batch;
};

API int cudnnCreateRNNDataDescriptor(struct sequences **sequences)
{
    *sequences = calloc(1, sizeof **sequences);
    return STATUS_SUCCESS;
}

API int cudnnDestroyRNNDataDescriptor(struct sequences *sequences)
{
    free(sequences);
    return STATUS_SUCCESS;
}

API int cudnnSetRNNDataDescriptor(struct sequences *sequences, int type, int layout, int steps, int batch, int width,
                                  const int *lengths, void *fill)
{
    *sequences = (struct sequences){.steps = steps, .batch = batch};
    return STATUS_SUCCESS;
}

/* Hidden-sized vectors that a layer keeps for each element of a sequence; 0: not known.
 *
 * An LSTM keeps its gates and its cell; a layer below the last its output as well.  All measured sizes that were found
 * are met: 46,137,600 and 23,068,928 bytes (LSTM), 54,526,208 and 27,263,232 (GRU) for two layers of 512 and 16 x 128
 * elements in fp32 and bf16 on an H200 (cuDNN 9).  Of 2017, without the last 256 bytes: 801,177,600 for a GRU both
 * ways over 64 x 326 elements (deepspeech.pytorch issue 172), twelve vectors of 800; 736,000,000 (LSTM) and 864,000,000
 * (GRU) on a P100 (pytorch issue 2895), whose parameters are those of four layers of 320: 23 and 27 times the same
 * 32,000,000, which is that of 25,000 elements; how many there were is not said. */
static size_t kept_vectors(const struct network *n)
{
    return n->cell == CELL_LSTM && !projected(n) ? 5 : n->cell == CELL_GRU ? 6 : 0;
}

static size_t reserve_bytes(const struct network *n, const struct sequences *x)
{
    size_t layers = (size_t)n->layers, vectors = kept_vectors(n);
    if (!vectors) {
        unknown_workspace("cudnnGetRNNTempSpaceSizes, kept for backward");
        return 0;
    }
    size_t vector = (size_t)x->steps * (size_t)x->batch * (size_t)n->hidden * (size_t)n->directions * element_bytes(n);
    return vector * (layers * vectors + layers - 1) + 256;
}

API int cudnnGetRNNTempSpaceSizes(void *handle, const struct network *n, int mode, const struct sequences *x,
                                  size_t *workspace, size_t *reserve)
{
    if (workspace) {
        *workspace = 0;
        unknown_workspace("cudnnGetRNNTempSpaceSizes, workspace");
    }
    if (reserve)
        *reserve = mode == MODE_TRAINING ? reserve_bytes(n, x) : 0;
    return STATUS_SUCCESS;
}
