// Whether the Python objects of a model are those that were recorded: called with the GIL held, before every step.
//
// A step streams all weights through the caches, so that each object is a cache miss. Modules are compared in groups, in
// stages that ask for what the next stage reads: half the time of one module after the other. Python's functions come as
// pointers (kernels/native/native_module_guard.py), of its stable interface only, so that this library loads without an interpreter.
#include "common.h"

namespace mi {

struct Object;  // a PyObject

struct Python {
    void (*dec_ref)(Object*);
    void (*clear_error)();
    Object* (*type_of)(Object*);
    Object* (*dict_of)(Object*, void*);
    Object* (*attribute)(Object*, Object*);
    int (*are_equal)(Object*, Object*, int operation);
    Object* (*item)(Object* dict, Object* key);  // borrowed
    int64_t (*dict_size)(Object*);
    int (*next)(Object* dict, int64_t* position, Object** key, Object** value);  // borrowed
    int64_t (*list_size)(Object*);
};

struct ModuleGuard {
    Object* gone;  // list that has an element when one of the recorded objects exists no more
    const uint64_t* facts;  // `_facts` in models/module_guard.py: columns of `num_modules` elements, then what the mappings hold
    Object* const* methods;  // (class, name, method) of each
    Object* names[5];  // "forward" and those of the mappings: hooks, hooks before, children, parameters
    int64_t num_modules, num_methods;
};

constexpr int kMappings = 4, kGroup = 8, kEqual = 2;

static void ask_for(const void* at) { __builtin_prefetch(at); }

// The tables of a dict: the fifth and sixth word of it so far, and if they are something else nothing is lost but time.
static void ask_for_tables(const Object* dict) {
    const char* const* words = (const char* const*)dict;
    ask_for(words[4]);
    ask_for(words[4] + 64);
    ask_for(words[5]);
    ask_for(words[5] + 64);
}

static bool same_values(const Python& py, Object* dict, const uint64_t*& held) {
    int64_t position = 0;
    Object *key, *value;
    while (py.next(dict, &position, &key, &value))
        if (*held++ != (uint64_t)value) return false;
    return true;
}

// Nothing here allocates, so that no collection of garbage frees a module after `gone` was looked at.
static bool same_modules(const Python& py, const ModuleGuard& c) {
    const int64_t n = c.num_modules;
    Object* const* modules = (Object* const*)c.facts;
    const uint64_t *types = c.facts + n, *sizes = types + n, *forward = sizes + n, *lengths = forward + n;
    const uint64_t *children = lengths + kMappings * n, *parameters = children;
    for (int64_t i = 0; i < n; ++i) parameters += lengths[2 * n + i];
    for (int64_t begin = 0; begin < n; begin += kGroup) {
        const int64_t count = n - begin < kGroup ? n - begin : kGroup;
        for (int64_t i = begin + count; i < n && i < begin + 2 * kGroup; ++i) {
            ask_for(modules[i]);
            ask_for((const char*)modules[i] - 32);  // the reference to its `__dict__`, in Pythons so far
        }
        Object *states[kGroup], *mappings[kGroup][kMappings];
        for (int64_t j = 0, i = begin; j < count; ++j, ++i) {
            Object* const type = py.type_of(modules[i]);
            py.dec_ref(type);  // the module holds it
            states[j] = py.dict_of(modules[i], nullptr);
            if ((uint64_t)type != types[i] || !states[j]) return false;
            py.dec_ref(states[j]);
            ask_for_tables(states[j]);
        }
        for (int64_t j = 0, i = begin; j < count; ++j, ++i) {
            Object* const state = states[j];
            if ((uint64_t)py.dict_size(state) != sizes[i] || (py.item(state, c.names[0]) != nullptr) != (forward[i] != 0)) return false;
            for (int k = 0; k < kMappings; ++k) {
                mappings[j][k] = py.item(state, c.names[1 + k]);
                if (!mappings[j][k]) return false;
                ask_for(mappings[j][k]);
            }
        }
        for (int64_t j = 0, i = begin; j < count; ++j, ++i)
            for (int k = 0; k < kMappings; ++k) {
                const uint64_t length = lengths[k * n + i];
                if ((uint64_t)py.dict_size(mappings[j][k]) != length) return false;
                if (k == 2 && length && !same_values(py, mappings[j][k], children)) return false;
                if (k == 3 && length && !same_values(py, mappings[j][k], parameters)) return false;
            }
    }
    return true;
}

static bool same_methods(const Python& py, const ModuleGuard& c) {
    for (Object* const *one = c.methods, *const *end = one + 3 * c.num_methods; one < end; one += 3) {
        Object* const found = py.attribute(one[0], one[1]);
        const bool same = found && py.are_equal(found, one[2], kEqual) == 1;
        if (found) py.dec_ref(found);
        if (!same) return false;
    }
    return true;
}

}  // namespace mi

// 1: all is as it was recorded. 0: it may be otherwise.
extern "C" int mi_guard_holds(const mi::Python* py, const mi::ModuleGuard* guard) {
    // Here, with the GIL held until the last module was read: an object that exists no more is not looked at.
    const bool holds = !py->list_size(guard->gone) && same_modules(*py, *guard) && same_methods(*py, *guard);
    py->clear_error();
    return holds;
}
