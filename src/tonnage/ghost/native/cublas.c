/* cuBLAS and cuBLASLt: handles that are told apart, matrix products in the log, one heuristic answer. */
#include "ghost.h"

#include <stdlib.h>
#include <string.h>

#define STATUS_SUCCESS 0
#define STATUS_INVALID_VALUE 7

/* PyTorch keys its workspaces by handle and stream: every handle is its own. */
struct cublasContext {
    cudaStream_t stream;
    int math_mode, pointer_mode, atomics_mode;
};
typedef struct cublasContext *cublasHandle_t;

#if GHOST_CUDA == 12
#define CUBLAS_VERSION 120804
#else
#define CUBLAS_VERSION 130100
#endif

API int cublasCreate_v2(cublasHandle_t *handle)
{
    device_use(current_device);
    *handle = calloc(1, sizeof **handle);
    return STATUS_SUCCESS;
}

API int cublasDestroy_v2(cublasHandle_t handle)
{
    free(handle);
    return STATUS_SUCCESS;
}

API int cublasGetVersion_v2(cublasHandle_t handle, int *version)
{
    *version = CUBLAS_VERSION;
    return STATUS_SUCCESS;
}

/* Library properties: 0 major, 1 minor, 2 patch. */
API int cublasGetProperty(int property, int *value)
{
    const int parts[] = {CUBLAS_VERSION / 10000, CUBLAS_VERSION / 100 % 100, CUBLAS_VERSION % 100};
    if (property < 0 || property > 2)
        return STATUS_INVALID_VALUE;
    *value = parts[property];
    return STATUS_SUCCESS;
}

API int cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream)
{
    handle->stream = stream;
    return STATUS_SUCCESS;
}

API int cublasGetStream_v2(cublasHandle_t handle, cudaStream_t *stream)
{
    *stream = handle->stream;
    return STATUS_SUCCESS;
}

API int cublasSetMathMode(cublasHandle_t handle, int mode)
{
    handle->math_mode = mode;
    return STATUS_SUCCESS;
}

API int cublasGetMathMode(cublasHandle_t handle, int *mode)
{
    *mode = handle->math_mode;
    return STATUS_SUCCESS;
}

API int cublasSetPointerMode_v2(cublasHandle_t handle, int mode)
{
    handle->pointer_mode = mode;
    return STATUS_SUCCESS;
}

API int cublasGetPointerMode_v2(cublasHandle_t handle, int *mode)
{
    *mode = handle->pointer_mode;
    return STATUS_SUCCESS;
}

API int cublasSetAtomicsMode(cublasHandle_t handle, int mode)
{
    handle->atomics_mode = mode;
    return STATUS_SUCCESS;
}

API int cublasGetAtomicsMode(cublasHandle_t handle, int *mode)
{
    *mode = handle->atomics_mode;
    return STATUS_SUCCESS;
}

/* The workspace given here is the caller's; without one cuBLAS takes its own from the device, which the
 * caller's measurements see: PyTorch always gives one. */
API int cublasSetWorkspace_v2(cublasHandle_t handle, void *workspace, size_t bytes)
{
    return STATUS_SUCCESS;
}

API const char *cublasGetStatusString(int status)
{
    return status == STATUS_SUCCESS ? "the cuBLAS operation completed successfully" : "a cuBLAS error";
}

API const char *cublasGetStatusName(int status)
{
    return status == STATUS_SUCCESS ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS_UNKNOWN";
}

/* ---- matrix products; cudaDataType numbers as in library_types.h ---- */

enum { TYPE_R32F = 0, TYPE_R64F = 1, TYPE_R16F = 2, TYPE_C32F = 4, TYPE_C64F = 5 };

#define PRODUCT(name, type, size)                                                                      \
    API int name(cublasHandle_t h, int ta, int tb, size m, size n, size k, const void *alpha,          \
                 const void *a, size lda, const void *b, size ldb, const void *beta, void *c, size ldc) \
    {                                                                                                  \
        library_call(#name, type, (int)m, (int)n, (int)k, 1, h->stream);                               \
        return STATUS_SUCCESS;                                                                         \
    }
#define PRODUCT_STRIDED(name, type, size)                                                              \
    API int name(cublasHandle_t h, int ta, int tb, size m, size n, size k, const void *alpha,          \
                 const void *a, size lda, long long stride_a, const void *b, size ldb,                 \
                 long long stride_b, const void *beta, void *c, size ldc, long long stride_c, size batch) \
    {                                                                                                  \
        library_call(#name, type, (int)m, (int)n, (int)k, (int)batch, h->stream);                      \
        return STATUS_SUCCESS;                                                                         \
    }
#define PRODUCT_BATCHED(name, type, size)                                                              \
    API int name(cublasHandle_t h, int ta, int tb, size m, size n, size k, const void *alpha,          \
                 const void *const *a, size lda, const void *const *b, size ldb, const void *beta,     \
                 void *const *c, size ldc, size batch)                                                 \
    {                                                                                                  \
        library_call(#name, type, (int)m, (int)n, (int)k, (int)batch, h->stream);                      \
        return STATUS_SUCCESS;                                                                         \
    }
#define FAMILY(letter, type)                                          \
    PRODUCT(cublas##letter##gemm_v2, type, int)                       \
    PRODUCT(cublas##letter##gemm_v2_64, type, int64_t)                \
    PRODUCT_STRIDED(cublas##letter##gemmStridedBatched, type, int)    \
    PRODUCT_STRIDED(cublas##letter##gemmStridedBatched_64, type, int64_t) \
    PRODUCT_BATCHED(cublas##letter##gemmBatched, type, int)           \
    PRODUCT_BATCHED(cublas##letter##gemmBatched_64, type, int64_t)

FAMILY(S, TYPE_R32F)
FAMILY(D, TYPE_R64F)
FAMILY(C, TYPE_C32F)
FAMILY(Z, TYPE_C64F)
PRODUCT(cublasHgemm, TYPE_R16F, int)
PRODUCT_STRIDED(cublasHgemmStridedBatched, TYPE_R16F, int)
PRODUCT_BATCHED(cublasHgemmBatched, TYPE_R16F, int)

#define PRODUCT_EX(name, size)                                                                           \
    API int name(cublasHandle_t h, int ta, int tb, size m, size n, size k, const void *alpha,            \
                 const void *a, int type_a, size lda, const void *b, int type_b, size ldb,               \
                 const void *beta, void *c, int type_c, size ldc, int compute, int algorithm)            \
    {                                                                                                    \
        library_call(#name, type_a, (int)m, (int)n, (int)k, 1, h->stream);                               \
        return STATUS_SUCCESS;                                                                           \
    }
#define PRODUCT_STRIDED_EX(name, size)                                                                   \
    API int name(cublasHandle_t h, int ta, int tb, size m, size n, size k, const void *alpha,            \
                 const void *a, int type_a, size lda, long long stride_a, const void *b, int type_b,     \
                 size ldb, long long stride_b, const void *beta, void *c, int type_c, size ldc,          \
                 long long stride_c, size batch, int compute, int algorithm)                             \
    {                                                                                                    \
        library_call(#name, type_a, (int)m, (int)n, (int)k, (int)batch, h->stream);                      \
        return STATUS_SUCCESS;                                                                           \
    }
#define PRODUCT_BATCHED_EX(name, size)                                                                   \
    API int name(cublasHandle_t h, int ta, int tb, size m, size n, size k, const void *alpha,            \
                 const void *const *a, int type_a, size lda, const void *const *b, int type_b, size ldb, \
                 const void *beta, void *const *c, int type_c, size ldc, size batch, int compute,        \
                 int algorithm)                                                                          \
    {                                                                                                    \
        library_call(#name, type_a, (int)m, (int)n, (int)k, (int)batch, h->stream);                      \
        return STATUS_SUCCESS;                                                                           \
    }

PRODUCT_EX(cublasGemmEx, int)
PRODUCT_EX(cublasGemmEx_64, int64_t)
PRODUCT_STRIDED_EX(cublasGemmStridedBatchedEx, int)
PRODUCT_STRIDED_EX(cublasGemmStridedBatchedEx_64, int64_t)
PRODUCT_BATCHED_EX(cublasGemmBatchedEx, int)
PRODUCT_BATCHED_EX(cublasGemmBatchedEx_64, int64_t)

#define PRODUCT_TYPED(name, size)                                                                        \
    API int name(cublasHandle_t h, int ta, int tb, size m, size n, size k, const void *alpha,            \
                 const void *a, int type_a, size lda, const void *b, int type_b, size ldb,               \
                 const void *beta, void *c, int type_c, size ldc)                                        \
    {                                                                                                    \
        library_call(#name, type_a, (int)m, (int)n, (int)k, 1, h->stream);                               \
        return STATUS_SUCCESS;                                                                           \
    }

PRODUCT_TYPED(cublasSgemmEx, int)
PRODUCT_TYPED(cublasSgemmEx_64, int64_t)

/* ---- cuBLASLt ---- */

/* Also made in the caller's own 64 bytes by the Init functions. */
struct layout {
    uint64_t rows, columns;
    int64_t leading;
    int32_t type, batch;
};

enum { LAYOUT_TYPE = 0, LAYOUT_ROWS = 2, LAYOUT_COLUMNS = 3, LAYOUT_LEADING = 4, LAYOUT_BATCH = 5 };

API int cublasLtCreate(void **handle)
{
    device_use(current_device);
    *handle = dummy_handle();
    return STATUS_SUCCESS;
}

API int cublasLtDestroy(void *handle)
{
    free(handle);
    return STATUS_SUCCESS;
}

API size_t cublasLtGetVersion(void)
{
    return CUBLAS_VERSION;
}

API size_t cublasLtGetCudartVersion(void)
{
    return GHOST_RUNTIME_VERSION;
}

API int cublasLtMatrixLayoutInit_internal(struct layout *layout, size_t size, int type, uint64_t rows,
                                          uint64_t columns, int64_t leading)
{
    *layout = (struct layout){rows, columns, leading, type, 1};
    return STATUS_SUCCESS;
}

API int cublasLtMatrixLayoutCreate(struct layout **layout, int type, uint64_t rows, uint64_t columns,
                                   int64_t leading)
{
    *layout = malloc(sizeof **layout);
    return cublasLtMatrixLayoutInit_internal(*layout, sizeof **layout, type, rows, columns, leading);
}

API int cublasLtMatrixLayoutDestroy(struct layout *layout)
{
    free(layout);
    return STATUS_SUCCESS;
}

static void *layout_field(struct layout *layout, int attribute, size_t *size)
{
    switch (attribute) {
    case LAYOUT_TYPE:
        *size = 4;
        return &layout->type;
    case LAYOUT_ROWS:
        *size = 8;
        return &layout->rows;
    case LAYOUT_COLUMNS:
        *size = 8;
        return &layout->columns;
    case LAYOUT_LEADING:
        *size = 8;
        return &layout->leading;
    case LAYOUT_BATCH:
        *size = 4;
        return &layout->batch;
    default:
        return NULL; /* order, strides and the like have no effect here */
    }
}

API int cublasLtMatrixLayoutSetAttribute(struct layout *layout, int attribute, const void *value, size_t size)
{
    size_t field_size;
    void *field = layout_field(layout, attribute, &field_size);
    if (field && size == field_size)
        memcpy(field, value, size);
    return STATUS_SUCCESS;
}

API int cublasLtMatrixLayoutGetAttribute(struct layout *layout, int attribute, void *value, size_t size,
                                         size_t *written)
{
    size_t field_size = size;
    const void *field = layout_field(layout, attribute, &field_size);
    memset(value, 0, size);
    if (field && size >= field_size)
        memcpy(value, field, field_size);
    if (written)
        *written = field_size;
    return STATUS_SUCCESS;
}

/* Descriptions of products and preferences are for the library's choice of kernel, which we do not make. */
API int cublasLtMatmulDescCreate(void **description, int compute_type, int scale_type)
{
    *description = dummy_handle();
    return STATUS_SUCCESS;
}

API int cublasLtMatmulDescDestroy(void *description)
{
    free(description);
    return STATUS_SUCCESS;
}

API int cublasLtMatmulDescSetAttribute(void *description, int attribute, const void *value, size_t size)
{
    return STATUS_SUCCESS;
}

API int cublasLtMatmulPreferenceCreate(void **preference)
{
    *preference = dummy_handle();
    return STATUS_SUCCESS;
}

API int cublasLtMatmulPreferenceDestroy(void *preference)
{
    free(preference);
    return STATUS_SUCCESS;
}

API int cublasLtMatmulPreferenceSetAttribute(void *preference, int attribute, const void *value, size_t size)
{
    return STATUS_SUCCESS;
}

struct heuristic {
    uint64_t algorithm[8];
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
};

/* One algorithm that needs no workspace.  PyTorch gives cuBLASLt a workspace of fixed size whatever the
 * answer is, so the answer moves no byte of its allocator. */
API int cublasLtMatmulAlgoGetHeuristic(void *handle, void *description, struct layout *a, struct layout *b,
                                       struct layout *c, struct layout *d, void *preference, int wanted,
                                       struct heuristic *results, int *count)
{
    *count = wanted > 0;
    if (*count) {
        memset(results, 0, sizeof *results);
        results->waves = 1;
    }
    return STATUS_SUCCESS;
}

API int cublasLtMatmulAlgoCheck(void *handle, void *description, struct layout *a, struct layout *b,
                                struct layout *c, struct layout *d, const void *algorithm,
                                struct heuristic *result)
{
    int count;
    return cublasLtMatmulAlgoGetHeuristic(handle, description, a, b, c, d, NULL, 1, result, &count);
}

API int cublasLtMatmul(void *handle, void *description, const void *alpha, const void *a,
                       const struct layout *layout_a, const void *b, const struct layout *layout_b,
                       const void *beta, const void *c, const struct layout *layout_c, void *d,
                       const struct layout *layout_d, const void *algorithm, void *workspace, size_t bytes,
                       cudaStream_t stream)
{
    /* the result is rows x columns; the inner length is what is left of A */
    uint64_t m = layout_d->rows, n = layout_d->columns;
    uint64_t k = m ? layout_a->rows * layout_a->columns / m : 0;
    library_call("cublasLtMatmul", layout_a->type, (int)m, (int)n, (int)k, layout_d->batch, stream);
    return STATUS_SUCCESS;
}
