/* CUDA graphs by capture: work submitted to a capturing stream becomes nodes; a launch logs and does them. */
#define _GNU_SOURCE
#include "ghost.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STATUS_NONE = 0, STATUS_ACTIVE = 1, STATUS_INVALIDATED = 2 };

struct CUgraph_st {
    int references;
    size_t count, capacity;
    struct operation *nodes;
};

struct CUgraphExec_st {
    struct CUgraph_st *graph;
    int device;     /* whose memory holds it */
    uint64_t bytes; /* outside of what the program allocates */
};

struct capture {
    uint64_t id;
    int status;
    struct CUstream_st *origin;
    struct CUgraph_st *graph;
};

static uint64_t next_capture = 1;
static __thread int capture_mode; /* global 0, thread local 1, relaxed 2: kept for whoever exchanges it */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct CUgraph_st *graph_new(void)
{
    struct CUgraph_st *graph = calloc(1, sizeof *graph);
    graph->references = 1;
    return graph;
}

static void graph_release(struct CUgraph_st *graph)
{
    if (graph && __atomic_sub_fetch(&graph->references, 1, __ATOMIC_ACQ_REL) == 0) {
        free(graph->nodes);
        free(graph);
    }
}

static void graph_add(struct CUgraph_st *graph, const struct operation *node)
{
    pthread_mutex_lock(&lock);
    if (graph->count == graph->capacity) {
        graph->capacity = graph->capacity ? 2 * graph->capacity : 256;
        graph->nodes = realloc(graph->nodes, graph->capacity * sizeof *graph->nodes);
    }
    graph->nodes[graph->count++] = *node;
    pthread_mutex_unlock(&lock);
}

/* ---- capture ---- */

/* A stream drawn in by an event leaves its capture when the capture ends. */
static struct capture *capture_of(const struct CUstream_st *stream)
{
    struct capture *capture = stream->capture;
    return capture && capture->status != STATUS_NONE ? capture : NULL;
}

bool capture_active(const struct CUstream_st *stream)
{
    return stream->capture && stream->capture->status == STATUS_ACTIVE;
}

void capture_add(struct CUstream_st *stream, const struct operation *operation)
{
    graph_add(stream->capture->graph, operation);
}

uint64_t capture_id(const struct CUstream_st *stream)
{
    const struct capture *capture = capture_of(stream);
    return capture ? capture->id : 0;
}

void capture_join(struct CUstream_st *stream, struct capture *capture)
{
    if (capture->status == STATUS_ACTIVE && !capture_of(stream))
        stream->capture = capture;
}

cudaError_t capture_check(cudaStream_t stream)
{
    struct capture *capture = capture_of(stream);
    if (!capture)
        return SUCCESS;
    capture->status = STATUS_INVALIDATED;
    return ERROR_CAPTURE_UNSUPPORTED;
}

API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, int mode)
{
    if ((uintptr_t)handle <= 2)
        return runtime_result(ERROR_CAPTURE_UNSUPPORTED);
    struct CUstream_st *stream = stream_of(handle);
    if (capture_of(stream))
        return runtime_result(ERROR_ILLEGAL_STATE);
    struct capture *capture = calloc(1, sizeof *capture); /* kept: events may refer to it for ever */
    capture->id = __atomic_fetch_add(&next_capture, 1, __ATOMIC_RELAXED);
    capture->status = STATUS_ACTIVE;
    capture->origin = stream;
    capture->graph = graph_new();
    stream->capture = capture;
    return SUCCESS;
}

API cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph, const cudaGraphNode_t *after,
                                              const void *edges, size_t count, int mode)
{
    cudaError_t error = cudaStreamBeginCapture(stream, mode);
    if (error == SUCCESS) {
        graph_release(stream->capture->graph);
        graph->references++;
        stream->capture->graph = graph;
    }
    return error;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph)
{
    struct CUstream_st *stream = stream_of(handle);
    struct capture *capture = capture_of(stream);
    *graph = NULL;
    if (!capture)
        return runtime_result(ERROR_ILLEGAL_STATE);
    if (capture->origin != stream)
        return runtime_result(ERROR_CAPTURE_UNMATCHED);
    bool broken = capture->status == STATUS_INVALIDATED;
    capture->status = STATUS_NONE;
    stream->capture = NULL;
    if (broken) {
        graph_release(capture->graph);
        return runtime_result(ERROR_CAPTURE_INVALIDATED);
    }
    *graph = capture->graph;
    return SUCCESS;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, int *status)
{
    const struct capture *capture = capture_of(stream_of(stream));
    *status = capture ? capture->status : STATUS_NONE;
    return SUCCESS;
}

static cudaError_t capture_info(cudaStream_t stream, int *status, unsigned long long *id, cudaGraph_t *graph,
                                const cudaGraphNode_t **nodes, const void **edges, size_t *count)
{
    const struct capture *capture = capture_of(stream_of(stream));
    *status = capture ? capture->status : STATUS_NONE;
    if (id)
        *id = capture ? capture->id : 0;
    if (graph)
        *graph = capture ? capture->graph : NULL;
    if (nodes)
        *nodes = NULL;
    if (edges)
        *edges = NULL;
    if (count)
        *count = 0;
    return SUCCESS;
}

#if GHOST_CUDA == 12
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, int *status, unsigned long long *id)
{
    return capture_info(stream, status, id, NULL, NULL, NULL, NULL);
}

API cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, int *status, unsigned long long *id,
                                            cudaGraph_t *graph, const cudaGraphNode_t **nodes, size_t *count)
{
    return capture_info(stream, status, id, graph, nodes, NULL, count);
}

API cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t stream, int *status, unsigned long long *id,
                                            cudaGraph_t *graph, const cudaGraphNode_t **nodes, const void **edges,
                                            size_t *count)
{
    return capture_info(stream, status, id, graph, nodes, edges, count);
}
#else
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, int *status, unsigned long long *id,
                                         cudaGraph_t *graph, const cudaGraphNode_t **nodes, const void **edges,
                                         size_t *count)
{
    return capture_info(stream, status, id, graph, nodes, edges, count);
}
#endif

API cudaError_t cudaThreadExchangeStreamCaptureMode(int *mode)
{
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return SUCCESS;
}

/* ---- graphs ---- */

API cudaError_t cudaGraphCreate(cudaGraph_t *graph, unsigned flags)
{
    *graph = graph_new();
    return SUCCESS;
}

API cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    graph_release(graph);
    return SUCCESS;
}

API cudaError_t cudaGraphClone(cudaGraph_t *clone, cudaGraph_t graph)
{
    *clone = graph_new();
    for (size_t i = 0; i < graph->count; i++)
        graph_add(*clone, &graph->nodes[i]);
    return SUCCESS;
}

static cudaError_t count_nodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    for (size_t i = 0; nodes && i < *count; i++)
        nodes[i] = i < graph->count ? (cudaGraphNode_t)&graph->nodes[i] : NULL;
    if (!nodes || *count > graph->count)
        *count = graph->count;
    return SUCCESS;
}

API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    return count_nodes(graph, nodes, count);
}

API cudaError_t cudaGraphGetRootNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    return count_nodes(graph, nodes, count);
}

/* Node types as the runtime numbers them: kernel 0, copy 1, fill 2, host 3, empty 5, wait 6, record 7. */
API cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, int *type)
{
    static const int types[] = {
        [RECORD_KERNEL] = 0,   [RECORD_COPY_H2D] = 1, [RECORD_COPY_D2H] = 1, [RECORD_COPY_D2D] = 1,
        [RECORD_MEMSET] = 2,   [RECORD_HOST_CALL] = 3, [RECORD_WAIT] = 6,    [RECORD_EVENT] = 7,
    };
    int kind = ((const struct operation *)node)->record.kind;
    *type = kind < (int)(sizeof types / sizeof *types) ? types[kind] : 5;
    return SUCCESS;
}

static cudaError_t instantiate(cudaGraphExec_t *executable, cudaGraph_t graph)
{
    uint64_t bytes = config()->graph_bytes;
    *executable = NULL;
    if (!device_take(current_device, bytes))
        return runtime_result(ERROR_OUT_OF_MEMORY);
    *executable = calloc(1, sizeof **executable);
    __atomic_fetch_add(&graph->references, 1, __ATOMIC_RELAXED);
    **executable = (struct CUgraphExec_st){graph, current_device, bytes};
    return SUCCESS;
}

API cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags)
{
    return instantiate(executable, graph);
}

API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph,
                                              unsigned long long flags)
{
    return instantiate(executable, graph);
}

API cudaError_t cudaGraphInstantiateWithParams(cudaGraphExec_t *executable, cudaGraph_t graph, void *parameters)
{
    return instantiate(executable, graph);
}

API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable)
{
    if (executable) {
        graph_release(executable->graph);
        device_give(executable->device, executable->bytes);
    }
    free(executable);
    return SUCCESS;
}

API cudaError_t cudaGraphExecUpdate(cudaGraphExec_t executable, cudaGraph_t graph, void *result)
{
    struct CUgraph_st *before = executable->graph;
    __atomic_fetch_add(&graph->references, 1, __ATOMIC_RELAXED);
    executable->graph = graph;
    graph_release(before);
    if (result)
        memset(result, 0, 24); /* cudaGraphExecUpdateResultInfo: success, no error node */
    return SUCCESS;
}

API cudaError_t cudaGraphUpload(cudaGraphExec_t executable, cudaStream_t stream)
{
    return SUCCESS;
}

API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream)
{
    const struct CUgraph_st *graph = executable->graph;
    struct operation start = {.record = {.kind = RECORD_GRAPH_LAUNCH, .grid_x = (uint32_t)graph->count}};
    submit(stream, &start);
    for (size_t i = 0; i < graph->count; i++) {
        struct operation node = graph->nodes[i];
        uint64_t captured_stream = node.record.stream;
        node.record.flags |= RECORD_REPLAYED;
        if (capture_active(stream_of(stream))) {
            submit(stream, &node);
            continue;
        }
        node.record.stream = captured_stream; /* branches of the graph stay apart in the log */
        perform(&node);
    }
    return SUCCESS;
}

API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char *path, unsigned flags)
{
    FILE *file = fopen(path, "w");
    if (!file)
        return runtime_result(ERROR_INVALID_VALUE);
    fprintf(file, "digraph ghost {\n");
    for (size_t i = 0; i < graph->count; i++)
        fprintf(file, "  n%zu [label=\"kind %d\"];\n", i, graph->nodes[i].record.kind);
    fprintf(file, "}\n");
    fclose(file);
    return SUCCESS;
}
