// The smallest test frame that does: TEST registers a function, CHECK ends the program with the line that failed.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

struct TestCase {
  const char* name;
  void (*body)();
};

inline std::vector<TestCase>& test_cases() {
  static std::vector<TestCase> cases;
  return cases;
}

#define TEST(name)                                                                       \
  static void name();                                                                    \
  static const bool name##_registered = (test_cases().push_back({#name, name}), true);   \
  static void name()

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)
