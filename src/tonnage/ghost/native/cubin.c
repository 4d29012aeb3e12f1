/* Facts about kernels in machine code.  A cubin is an ELF file; its section .nv.info is a list of attributes, one of
 * which has a symbol and the registers that a thread of that kernel needs (shown by `cuobjdump -res-usage`; compared
 * with the output of ptxas for compute capability 8.0, 9.0 and 10.0). */
#define _GNU_SOURCE
#include "ghost.h"

#include <elf.h>
#include <string.h>

enum { MACHINE_CUDA = 190, ATTRIBUTE_WITH_VALUES = 4, ATTRIBUTE_REGISTERS = 0x2f, ENTRY_OF_HOST = 0x10 };

struct attribute {
    uint8_t format, kind;
    uint16_t bytes; /* of values, where there are some */
};

static const char *at(const Elf64_Ehdr *file, uint64_t offset)
{
    return (const char *)file + offset;
}

static void read_attributes(const Elf64_Ehdr *file, const Elf64_Shdr *info, const Elf64_Shdr *symbols,
                            const char *names, void (*found)(void *, const char *, int), void *context)
{
    const char *next = at(file, info->sh_offset), *end = next + info->sh_size;
    while (next + sizeof(struct attribute) <= end) {
        struct attribute attribute;
        memcpy(&attribute, next, sizeof attribute);
        next += sizeof attribute;
        if (attribute.format != ATTRIBUTE_WITH_VALUES)
            continue;
        uint32_t values[2];
        if (attribute.kind == ATTRIBUTE_REGISTERS && attribute.bytes == sizeof values && next + sizeof values <= end) {
            memcpy(values, next, sizeof values);
            const Elf64_Sym *symbol = (const Elf64_Sym *)at(file, symbols->sh_offset) + values[0];
            if (values[0] < symbols->sh_size / sizeof *symbol)
                found(context, names + symbol->st_name, (int)values[1]);
        }
        next += attribute.bytes;
    }
}

struct cubin {
    const Elf64_Ehdr *file;
    const Elf64_Shdr *symbols, *info; /* NULL where it has none */
    const char *names;                /* of symbols */
};

static struct cubin open_cubin(const void *image)
{
    const Elf64_Ehdr *file = image;
    struct cubin cubin = {0};
    if (!image || memcmp(file->e_ident, ELFMAG, SELFMAG) != 0 || file->e_ident[EI_CLASS] != ELFCLASS64 ||
        file->e_machine != MACHINE_CUDA || file->e_shentsize != sizeof(Elf64_Shdr))
        return cubin;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)at(file, file->e_shoff);
    const char *names = at(file, sections[file->e_shstrndx].sh_offset);
    cubin.file = file;
    for (int i = 0; i < file->e_shnum; i++) {
        if (sections[i].sh_type == SHT_SYMTAB)
            cubin.symbols = &sections[i];
        if (strcmp(names + sections[i].sh_name, ".nv.info") == 0)
            cubin.info = &sections[i];
    }
    if (cubin.symbols)
        cubin.names = at(file, sections[cubin.symbols->sh_link].sh_offset);
    return cubin;
}

void cubin_registers(const void *image, void (*found)(void *context, const char *kernel, int registers), void *context)
{
    struct cubin cubin = open_cubin(image);
    if (cubin.symbols && cubin.info)
        read_attributes(cubin.file, cubin.info, cubin.symbols, cubin.names, found, context);
}

/* Functions that the host can launch have a flag of their own beside the ELF type of functions. */
void cubin_kernels(const void *image, void (*found)(void *context, const char *kernel), void *context)
{
    struct cubin cubin = open_cubin(image);
    if (!cubin.symbols)
        return;
    const Elf64_Sym *symbol = (const Elf64_Sym *)at(cubin.file, cubin.symbols->sh_offset);
    const Elf64_Sym *end = symbol + cubin.symbols->sh_size / sizeof *symbol;
    for (; symbol < end; symbol++)
        if (ELF64_ST_TYPE(symbol->st_info) == STT_FUNC && symbol->st_other & ENTRY_OF_HOST)
            found(context, cubin.names + symbol->st_name);
}
