// A walk follows words through objects, takes what they say, and stops at what is not as they say.
#include <cstring>
#include <vector>

#include "asyncckpt.h"
#include "check.hpp"

namespace {

// All objects are lists of keys and values.
struct Object {
  uint64_t type = 1;
  int64_t references = 1;
  std::vector<Object*> keys = {};
  std::vector<Object*> values = {};
  Object* attributes = nullptr;
};

int next(Object* dict, int64_t* position, Object** key, Object** value) {
  if (*position >= static_cast<int64_t>(dict->values.size())) return 0;
  *key = dict->keys[static_cast<size_t>(*position)];
  *value = dict->values[static_cast<size_t>(*position)];
  ++*position;
  return 1;
}
Object* attributes(Object* object, void*) {
  if (object->attributes != nullptr) ++object->attributes->references;
  return object->attributes;
}
int64_t size(Object* object) { return static_cast<int64_t>(object->values.size()); }
Object* item(Object* object, int64_t at) { return object->values[static_cast<size_t>(at)]; }
void hold(Object* object) { ++object->references; }
void let_go(Object* object) {
  if (object != nullptr) --object->references;
}

template <class Function>
const void* as_pointer(Function* function) {
  return reinterpret_cast<const void*>(function);
}

const ac_python python = {as_pointer(next), as_pointer(attributes), as_pointer(size), as_pointer(item),
                          as_pointer(item), as_pointer(hold),       as_pointer(let_go), 0};

uint64_t at(const Object& object) { return reinterpret_cast<uint64_t>(&object); }

// {key: object with {key: leaf}, other: [leaf, nothing]}
struct State {
  Object key{7}, other{7}, leaf{5}, nothing{6};
  Object inner{2, 1, {&key}, {&leaf}};
  Object object{3, 1, {}, {}, &inner};
  Object list{4, 1, {}, {&leaf, &nothing}};
  Object root{2, 1, {&key, &other}, {&object, &list}};
  std::vector<uint64_t> words{AC_WALK_DICT, 2, 2,           at(key),  AC_WALK_OBJECT, 3, 0, AC_WALK_DICT,
                              2,            1, at(key),     AC_WALK_TAKE, 1,          5, at(other), AC_WALK_LIST,
                              4,            2, AC_WALK_ANY, AC_WALK_EMPTY, 6};
  std::vector<const void*> found = std::vector<const void*>(2, nullptr);

  int32_t status(uint64_t& alike) {
    return ac_walk(&python, &root, words.data(), words.size(), found.data(), found.size(), &alike, nullptr);
  }
  bool is_alike() {
    uint64_t alike = 7;
    CHECK(status(alike) == AC_OK && alike <= 1);
    return alike == 1;
  }
};

}  // namespace

TEST(a_walk_takes_what_its_words_say) {
  State state;
  CHECK(state.is_alike() && state.found[0] == &state.object && state.found[1] == &state.leaf);
  CHECK(state.object.references == 2 && state.leaf.references == 2 && state.inner.references == 1);
  CHECK(state.is_alike() && state.object.references == 2 && state.leaf.references == 2);
  Object another{5};
  state.inner.values[0] = &another;
  CHECK(state.is_alike() && state.found[1] == &another && another.references == 2 && state.leaf.references == 1);
}

TEST(each_word_of_a_walk_counts) {
  for (int change = 0; change < 12; ++change) {
    State state;
    Object more{5};
    if (change == 0) state.root.type = 9;
    if (change == 1) state.root.keys[1] = &state.key;
    if (change == 2) state.root.keys.push_back(&more), state.root.values.push_back(&more);
    if (change == 3) state.root.keys.pop_back(), state.root.values.pop_back();
    if (change == 4) state.object.type = 9;
    if (change == 5) state.object.attributes = nullptr;
    if (change == 6) state.object.attributes = &more;
    if (change == 7) state.leaf.type = 9;
    if (change == 8) state.list.values.push_back(&more);
    if (change == 9) state.list.values.pop_back();
    if (change == 10) state.nothing.values.push_back(&more);
    if (change == 11) state.nothing.type = 9;
    CHECK(!state.is_alike());
  }
}

TEST(one_object_may_be_wanted) {
  State state;
  state.words = {AC_WALK_SAME, at(state.root)};
  CHECK(state.is_alike());
  state.words[1] = at(state.key);
  CHECK(!state.is_alike());
}

TEST(broken_words_of_a_walk_are_refused) {
  uint64_t alike = 0;
  for (size_t count = 1; count < State().words.size(); ++count) {
    State state;
    state.words.resize(count);
    CHECK(state.status(alike) == AC_INVALID && state.inner.references == 1);
  }
  State longer, unknown, slots, without;
  longer.words.push_back(0);
  CHECK(longer.status(alike) == AC_INVALID);
  unknown.words[0] = AC_WALK_OBJECT + 1;
  CHECK(unknown.status(alike) == AC_INVALID);
  slots.found.resize(1);
  CHECK(slots.status(alike) == AC_INVALID);
  ac_python functions = python;
  functions.hold = nullptr;
  CHECK(ac_walk(&functions, &without.root, without.words.data(), without.words.size(), without.found.data(), 2, &alike,
                nullptr) == AC_INVALID);
  CHECK(ac_walk(&python, nullptr, without.words.data(), without.words.size(), without.found.data(), 2, &alike,
                nullptr) == AC_INVALID);
}

TEST(a_walk_is_not_deeper_than_the_stack) {
  Object list{4};
  list.values = {&list};
  std::vector<uint64_t> words;
  for (int depth = 0; depth < 2000; ++depth) words.insert(words.end(), {AC_WALK_LIST, 4, 1});
  words.push_back(AC_WALK_ANY);
  uint64_t alike = 0;
  CHECK(ac_walk(&python, &list, words.data(), words.size(), nullptr, 0, &alike, nullptr) == AC_INVALID);
}
