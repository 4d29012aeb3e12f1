/* Code that a program loads at run time: the driver's and the runtime's libraries of kernels, and the driver's modules. */
#define _GNU_SOURCE
#include "ghost.h"

static CUresult load_file(struct module **module, const char *path)
{
    *module = module_from_file(path);
    return *module ? SUCCESS : ERROR_FILE_NOT_FOUND;
}

API CUresult cuModuleLoad(struct module **module, const char *path)
{
    device_use(current_device);
    return load_file(module, path);
}

API CUresult cuModuleGetFunctionCount(unsigned *count, struct module *module)
{
    *count = module_kernels(module, NULL, 0);
    return SUCCESS;
}

API CUresult cuModuleEnumerateFunctions(struct function **functions, unsigned room, struct module *module)
{
    module_kernels(module, functions, room);
    return SUCCESS;
}

API CUresult cuLibraryLoadData(struct module **library, const void *image, void *jit, void **jit_values,
                               unsigned jit_count, void *options, void **values, unsigned count)
{
    *library = module_new(image);
    return SUCCESS;
}

API CUresult cuLibraryUnload(struct module *library)
{
    return SUCCESS;
}

API CUresult cuLibraryGetKernel(struct function **kernel, struct module *library, const char *name)
{
    *kernel = module_function(library, name);
    return SUCCESS;
}

API CUresult cuLibraryGetModule(struct module **module, struct module *library)
{
    *module = library;
    return SUCCESS;
}

API CUresult cuKernelGetFunction(struct function **function, struct function *kernel)
{
    *function = kernel;
    return SUCCESS;
}

API cudaError_t cudaLibraryLoadData(struct module **library, const void *image, void *jit, void **jit_values,
                                    unsigned jit_count, void *options, void **values, unsigned count)
{
    *library = module_new(image);
    return SUCCESS;
}

API cudaError_t cudaLibraryGetKernel(struct function **kernel, struct module *library, const char *name)
{
    *kernel = module_function(library, name);
    return SUCCESS;
}

API cudaError_t cudaLibraryUnload(struct module *library)
{
    return SUCCESS;
}

/* ---- from files, and the kernels that they have ---- */

API CUresult cuLibraryLoadFromFile(struct module **library, const char *path, void *jit, void **jit_values,
                                   unsigned jit_count, void *options, void **values, unsigned count)
{
    return load_file(library, path);
}

API CUresult cuLibraryGetKernelCount(unsigned *count, struct module *library)
{
    return cuModuleGetFunctionCount(count, library);
}

API CUresult cuLibraryEnumerateKernels(struct function **kernels, unsigned room, struct module *library)
{
    return cuModuleEnumerateFunctions(kernels, room, library);
}

API cudaError_t cudaLibraryLoadFromFile(struct module **library, const char *path, void *jit, void **jit_values,
                                        unsigned jit_count, void *options, void **values, unsigned count)
{
    return runtime_result(load_file(library, path));
}

API cudaError_t cudaLibraryGetKernelCount(unsigned *count, struct module *library)
{
    return cuModuleGetFunctionCount(count, library);
}

API cudaError_t cudaLibraryEnumerateKernels(struct function **kernels, unsigned room, struct module *library)
{
    return cuModuleEnumerateFunctions(kernels, room, library);
}

API CUresult cuKernelGetName(const char **name, const struct function *kernel)
{
    *name = kernel->text;
    return SUCCESS;
}
