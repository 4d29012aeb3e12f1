/* Ordered ranges of addresses: a treap keyed by start.  All steps are O(log n) in the expected case. */
#include "ghost.h"

static uint32_t random_priority(void)
{
    static uint32_t state = 2463534242u; /* xorshift; callers hold their own lock, and only balance depends on it */
    state ^= state << 13;
    state ^= state >> 17;
    return state ^= state << 5;
}

/* Splits into ranges before `address` and ranges at or after it. */
static void split(struct range *root, uint64_t address, struct range **before, struct range **after)
{
    if (!root) {
        *before = *after = NULL;
    } else if (root->start < address) {
        split(root->right, address, &root->right, after);
        *before = root;
    } else {
        split(root->left, address, before, &root->left);
        *after = root;
    }
}

static struct range *merge(struct range *before, struct range *after)
{
    if (!before || !after)
        return before ? before : after;
    if (before->priority > after->priority) {
        before->right = merge(before->right, after);
        return before;
    }
    after->left = merge(before, after->left);
    return after;
}

void range_insert(struct range **root, struct range *range)
{
    range->priority = random_priority();
    while (*root && (*root)->priority >= range->priority)
        root = range->start < (*root)->start ? &(*root)->left : &(*root)->right;
    split(*root, range->start, &range->left, &range->right);
    *root = range;
}

void range_remove(struct range **root, struct range *range)
{
    while (*root && *root != range)
        root = range->start < (*root)->start ? &(*root)->left : &(*root)->right;
    if (*root)
        *root = merge(range->left, range->right);
}

struct range *range_floor(struct range *root, uint64_t address)
{
    struct range *found = NULL;
    while (root) {
        if (root->start <= address) {
            found = root;
            root = root->right;
        } else {
            root = root->left;
        }
    }
    return found;
}

struct range *range_ceiling(struct range *root, uint64_t address)
{
    struct range *found = NULL;
    while (root) {
        if (root->start >= address) {
            found = root;
            root = root->left;
        } else {
            root = root->right;
        }
    }
    return found;
}

struct range *range_holding(struct range *root, uint64_t address)
{
    struct range *range = range_floor(root, address);
    return range && address - range->start < range->bytes ? range : NULL;
}
