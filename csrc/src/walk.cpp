// Objects of Python are visited in the order of recorded words, and each has to be what these say.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "asyncckpt.h"
#include "error.hpp"
#include "prefetch.hpp"

namespace asyncckpt {
namespace {

constexpr uint64_t ahead = 16;
constexpr uint64_t depth_max = 1000;  // of visits inside of each other; each takes some hundred bytes of the stack

using Object = const void*;

class Python {
 public:
  explicit Python(const ac_python& found) : found_(found) {
    for (const void* function : {found.dict_next, found.dict_of, found.object_size, found.list_item, found.tuple_item,
                                 found.hold, found.let_go}) {
      require(function != nullptr, "a function of Python is NULL");
    }
  }

  uint64_t type(Object object) const {
    uint64_t value;
    std::memcpy(&value, static_cast<const char*>(object) + found_.type_offset, sizeof value);
    return value;
  }
  bool next(Object dict, int64_t& position, Object& key, Object& value) const {
    return as<int (*)(Object, int64_t*, Object*, Object*)>(found_.dict_next)(dict, &position, &key, &value) != 0;
  }
  int64_t size(Object object) const { return as<int64_t (*)(Object)>(found_.object_size)(object); }
  Object list_item(Object list, int64_t at) const {
    return as<Object (*)(Object, int64_t)>(found_.list_item)(list, at);
  }
  Object tuple_item(Object tuple, int64_t at) const {
    return as<Object (*)(Object, int64_t)>(found_.tuple_item)(tuple, at);
  }
  // The caller gets a reference.
  Object dict_of(Object object) const { return as<Object (*)(Object, void*)>(found_.dict_of)(object, nullptr); }
  void hold(Object object) const { as<void (*)(Object)>(found_.hold)(object); }
  void let_go(Object object) const { as<void (*)(Object)>(found_.let_go)(object); }

 private:
  template <class Function>
  static Function as(const void* address) {
    return reinterpret_cast<Function>(const_cast<void*>(address));
  }

  const ac_python& found_;
};

// A reference that is given back, also where a word behind it is refused.
class Held {
 public:
  Held(const Python& python, Object object) : python_(python), object_(object) {}
  ~Held() { python_.let_go(object_); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  Object get() const { return object_; }

 private:
  const Python& python_;
  Object object_;
};

class Walk {
 public:
  Walk(const Python& python, const uint64_t* words, uint64_t words_count, Object* found, uint64_t slots)
      : python_(python), at_(words), end_(words + words_count), found_(found), slots_(slots) {}

  // Whether the object is as the next words say. All of these are read if it is, else some.
  bool visit(Object object) {
    const uint64_t step = word();
    if (step == AC_WALK_ANY) return true;
    if (step == AC_WALK_TAKE) return take(object);
    if (step == AC_WALK_SAME) return reinterpret_cast<uint64_t>(object) == word();
    require(AC_WALK_SAME < step && step <= AC_WALK_OBJECT, "a word is no step of a walk");
    if (python_.type(object) != word()) return false;
    if (step == AC_WALK_EMPTY) return python_.size(object) == 0;
    require(++depth_ <= depth_max, "a walk is nested too deeply");
    const bool is_alike = step == AC_WALK_DICT     ? dict(object)
                          : step == AC_WALK_OBJECT ? own(object)
                                                   : items(object, step);
    --depth_;
    return is_alike;
  }

  bool is_at_end() const { return at_ == end_; }

 private:
  uint64_t word() {
    require(at_ < end_, "a walk has too few words");
    return *at_++;
  }

  bool take(Object object) {
    const uint64_t slot = word(), type = word();
    if (type != 0 && python_.type(object) != type) return false;
    put(object, slot);
    return true;
  }

  void put(Object object, uint64_t slot) {
    require(slot < slots_, "a walk takes more than there are slots");
    python_.hold(object);
    const Object before = found_[slot];
    found_[slot] = object;
    python_.let_go(before);
  }

  // What a dict refers to lies anywhere in memory, so it is asked for some entries before it is looked at.
  bool dict(Object object) {
    struct Entry {
      Object key, value;
    };
    std::array<Entry, ahead> entries;
    int64_t position = 0;
    for (uint64_t left = word(); left > 0;) {
      const uint64_t count = std::min<uint64_t>(left, ahead);
      for (uint64_t at = 0; at < count; ++at) {
        if (!python_.next(object, position, entries[at].key, entries[at].value)) return false;
        prefetch_to_read(entries[at].value);
      }
      for (uint64_t at = 0; at < count; ++at) {
        if (reinterpret_cast<uint64_t>(entries[at].key) != word() || !visit(entries[at].value)) return false;
      }
      left -= count;
    }
    Entry more;
    return !python_.next(object, position, more.key, more.value);
  }

  bool items(Object object, uint64_t step) {
    const auto count = static_cast<int64_t>(word());
    if (python_.size(object) != count) return false;
    for (int64_t at = 0; at < count; ++at) {
      const Object item = step == AC_WALK_LIST ? python_.list_item(object, at) : python_.tuple_item(object, at);
      if (item == nullptr || !visit(item)) return false;
    }
    return true;
  }

  bool own(Object object) {
    const uint64_t slot = word();
    if (slot != AC_WALK_NO_SLOT) put(object, slot);
    const Held attributes(python_, python_.dict_of(object));  // The object has it, too.
    return attributes.get() != nullptr && visit(attributes.get());
  }

  const Python& python_;
  const uint64_t* at_;
  const uint64_t* end_;
  Object* found_;
  uint64_t slots_;
  uint64_t depth_ = 0;
};

}  // namespace
}  // namespace asyncckpt

extern "C" int32_t ac_walk(const ac_python* python, const void* root, const uint64_t* words, uint64_t words_count,
                           const void** found, uint64_t slots, uint64_t* alike, ac_error* error) {
  using namespace asyncckpt;
  return at_border(error, [&] {
    require(python != nullptr && root != nullptr && words != nullptr && alike != nullptr,
            "python, root, words or alike is NULL");
    require(slots == 0 || found != nullptr, "found is NULL");
    const Python functions(*python);
    Walk walk(functions, words, words_count, found, slots);
    *alike = walk.visit(root) ? 1 : 0;
    require(*alike == 0 || walk.is_at_end(), "a walk has too many words");
  });
}
