/* The rest: functions of the smaller libraries whose answer must be more than "success". */
#include "ghost.h"

#include <stdlib.h>
#include <string.h>

/* ---- NVRTC: a program "compiles" to an empty image ---- */

static const char no_code[] = "// ghost\n";

API int nvrtcVersion(int *major, int *minor)
{
    *major = GHOST_RUNTIME_VERSION / 1000;
    *minor = GHOST_RUNTIME_VERSION % 1000 / 10;
    return 0;
}

API const char *nvrtcGetErrorString(int error)
{
    return error == 0 ? "NVRTC_SUCCESS" : "NVRTC_ERROR_INTERNAL_ERROR";
}

/* The architectures that --gpu-architecture takes, as NVRTC's guide of CUDA 12.8 and 13.0 lists them. */
static const int architectures[] = {
#if GHOST_CUDA == 12
    50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 120,
#else
    75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121,
#endif
};

API int nvrtcGetNumSupportedArchs(int *count)
{
    *count = (int)(sizeof architectures / sizeof *architectures);
    return 0;
}

API int nvrtcGetSupportedArchs(int *found)
{
    memcpy(found, architectures, sizeof architectures);
    return 0;
}

API int nvrtcCreateProgram(void **program, const char *source, const char *name, int headers,
                           const char *const *header_sources, const char *const *header_names)
{
    *program = dummy_handle();
    return 0;
}

API int nvrtcCompileProgram(void *program, int count, const char *const *options)
{
    return 0;
}

API int nvrtcDestroyProgram(void **program)
{
    free(*program);
    *program = NULL;
    return 0;
}

/* Names of kernels given before compilation are those they are loaded by. */
API int nvrtcAddNameExpression(void *program, const char *expression)
{
    return 0;
}

API int nvrtcGetLoweredName(void *program, const char *expression, const char **name)
{
    *name = expression;
    return 0;
}

static int image_size(size_t *bytes)
{
    *bytes = sizeof no_code;
    return 0;
}

static int image(char *code)
{
    memcpy(code, no_code, sizeof no_code);
    return 0;
}

API int nvrtcGetPTXSize(void *program, size_t *bytes)
{
    return image_size(bytes);
}

API int nvrtcGetPTX(void *program, char *code)
{
    return image(code);
}

API int nvrtcGetCUBINSize(void *program, size_t *bytes)
{
    return image_size(bytes);
}

API int nvrtcGetCUBIN(void *program, char *code)
{
    return image(code);
}

API int nvrtcGetProgramLogSize(void *program, size_t *bytes)
{
    *bytes = 1;
    return 0;
}

API int nvrtcGetProgramLog(void *program, char *text)
{
    text[0] = 0;
    return 0;
}

/* ---- CUPTI: there is nothing to profile ---- */

API int cuptiGetVersion(uint32_t *version)
{
    *version = GHOST_CUDA == 12 ? 26 : 130000;
    return 0;
}

API int cuptiGetResultString(int result, const char **text)
{
    *text = result == 0 ? "CUPTI_SUCCESS" : "CUPTI_ERROR";
    return 0;
}

API int cuptiGetCallbackName(int domain, uint32_t id, const char **name)
{
    *name = "";
    return 0;
}

API int cuptiActivityGetNextRecord(uint8_t *buffer, size_t bytes, void **record)
{
    *record = NULL;
    return 12; /* CUPTI_ERROR_MAX_LIMIT_REACHED: no more records */
}

/* ---- cuFFT: plans are small numbers ---- */

static int next_plan = 1;

static int new_plan(int *plan)
{
    *plan = __atomic_fetch_add(&next_plan, 1, __ATOMIC_RELAXED);
    return 0;
}

API int cufftCreate(int *plan)
{
    return new_plan(plan);
}

API int cufftPlan1d(int *plan, int n, int type, int batch)
{
    return new_plan(plan);
}

API int cufftPlan2d(int *plan, int nx, int ny, int type)
{
    return new_plan(plan);
}

API int cufftPlan3d(int *plan, int nx, int ny, int nz, int type)
{
    return new_plan(plan);
}

API int cufftPlanMany(int *plan, int rank, int *n, int *in, int in_stride, int in_distance, int *out,
                      int out_stride, int out_distance, int type, int batch)
{
    return new_plan(plan);
}

API int cufftGetVersion(int *version)
{
    *version = GHOST_CUDA == 12 ? 11303 : 12000;
    return 0;
}

/* The work area of a plan is the library's secret. */
static int unknown_work_area(size_t *bytes)
{
    unknown_workspace("cufft work area");
    if (bytes)
        *bytes = 0;
    return 0;
}

API int cufftXtMakePlanMany(int plan, int rank, long long *n, long long *in, long long in_stride,
                            long long in_distance, int in_type, long long *out, long long out_stride,
                            long long out_distance, int out_type, long long batch, size_t *bytes, int execution)
{
    return unknown_work_area(bytes);
}

API int cufftMakePlanMany64(int plan, int rank, long long *n, long long *in, long long in_stride,
                            long long in_distance, long long *out, long long out_stride, long long out_distance,
                            int type, long long batch, size_t *bytes)
{
    return unknown_work_area(bytes);
}

API int cufftGetSize(int plan, size_t *bytes)
{
    return unknown_work_area(bytes);
}

/* The stream of a plan is kept in a table, as a plan is a number. */
static cudaStream_t plan_streams[1024];

API int cufftSetStream(int plan, cudaStream_t stream)
{
    if (plan > 0 && plan < 1024)
        plan_streams[plan] = stream;
    return 0;
}

static int execute(int plan)
{
    library_call("cufftExec", 0, 0, 0, 0, 0, plan > 0 && plan < 1024 ? plan_streams[plan] : NULL);
    return 0;
}

API int cufftXtExec(int plan, void *in, void *out, int direction)
{
    return execute(plan);
}

#define EXECUTE(name)                                        \
    API int name(int plan, void *in, void *out, int direction) \
    {                                                        \
        return execute(plan);                                \
    }

EXECUTE(cufftExecC2C)
EXECUTE(cufftExecR2C)
EXECUTE(cufftExecC2R)
EXECUTE(cufftExecZ2Z)
EXECUTE(cufftExecD2Z)
EXECUTE(cufftExecZ2D)

/* ---- cuSOLVER, cuSPARSE, cuRAND: a handle begins with its stream ---- */

struct stream_handle {
    cudaStream_t stream;
};

#define HANDLE(library)                                                             \
    API int library##Create(struct stream_handle **handle)                          \
    {                                                                               \
        device_use(current_device);                                                 \
        *handle = dummy_handle();                                                   \
        return 0;                                                                   \
    }                                                                               \
    API int library##Destroy(struct stream_handle *handle)                          \
    {                                                                               \
        free(handle);                                                               \
        return 0;                                                                   \
    }                                                                               \
    API int library##SetStream(struct stream_handle *handle, cudaStream_t stream)   \
    {                                                                               \
        handle->stream = stream;                                                    \
        return 0;                                                                   \
    }                                                                               \
    API int library##GetStream(struct stream_handle *handle, cudaStream_t *stream)  \
    {                                                                               \
        *stream = handle->stream;                                                   \
        return 0;                                                                   \
    }

HANDLE(cusolverDn)
HANDLE(cusolverSp)
HANDLE(cusparse)

API int curandCreateGenerator(struct stream_handle **handle, int type)
{
    return cusolverDnCreate(handle);
}

API int curandSetStream(struct stream_handle *handle, cudaStream_t stream)
{
    return cusolverDnSetStream(handle, stream);
}

/* ---- NVSHMEM: its memory is the device's; one processing element ---- */

API int nvshmemid_init_status(void)
{
    return 2; /* initialised and usable */
}

API void *nvshmem_malloc(size_t bytes)
{
    void *pointer;
    return memory_allocate(&pointer, bytes, current_device) == SUCCESS ? pointer : NULL;
}

API void nvshmem_free(void *pointer)
{
    memory_free(pointer);
}

API void *nvshmem_ptr(const void *pointer, int element)
{
    return (void *)pointer;
}

API int nvshmem_n_pes(void)
{
    return 1;
}

API int nvshmem_my_pe(void)
{
    return 0;
}

API int nvshmem_team_n_pes(int team)
{
    return 1;
}

/* ---- NVTX: names for profilers ---- */

API void *nvtxDomainCreateA(const char *name)
{
    return dummy_handle();
}

API int nvtxRangePushA(const char *message)
{
    return 0;
}

API int nvtxRangePop(void)
{
    return 0;
}
