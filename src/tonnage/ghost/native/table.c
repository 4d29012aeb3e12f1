/* A hash table from numbers to pointers: open addressing, grows at two thirds, never forgets a key. */
#include "ghost.h"

#include <stdlib.h>

static struct slot *slot_for(const struct table *table, uint64_t key)
{
    size_t mask = table->capacity - 1;
    size_t i = (key * 0x9E3779B97F4A7C15ull >> 32) & mask;
    while (table->slots[i].value && table->slots[i].key != key)
        i = (i + 1) & mask;
    return &table->slots[i];
}

void *table_get(const struct table *table, uint64_t key)
{
    return table->capacity ? slot_for(table, key)->value : NULL;
}

static void grow(struct table *table)
{
    struct table bigger = {.capacity = table->capacity ? table->capacity * 2 : 1024, .used = table->used};
    bigger.slots = calloc(bigger.capacity, sizeof *bigger.slots);
    for (size_t i = 0; i < table->capacity; i++)
        if (table->slots[i].value)
            *slot_for(&bigger, table->slots[i].key) = table->slots[i];
    free(table->slots);
    *table = bigger;
}

void table_put(struct table *table, uint64_t key, void *value)
{
    if (3 * (table->used + 1) > 2 * table->capacity)
        grow(table);
    struct slot *slot = slot_for(table, key);
    table->used += !slot->value;
    *slot = (struct slot){key, value};
}
