// core_test [name]: run all tests, or those whose name contains the argument.
#include <cstring>

#include "check.hpp"

int main(int count, char** arguments) {
  int run = 0;
  for (const TestCase& test : test_cases()) {
    if (count > 1 && std::strstr(test.name, arguments[1]) == nullptr) continue;
    std::fprintf(stderr, "%s\n", test.name);
    test.body();
    ++run;
  }
  std::fprintf(stderr, "%d tests passed\n", run);
  return run > 0 ? 0 : 1;
}
