// A handful of lines instead of a test framework: a failed check says where and ends the program.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            std::fprintf(stderr, "%s:%d: %s does not hold: ", __FILE__, __LINE__, #condition);                         \
            std::fprintf(stderr, __VA_ARGS__);                                                                         \
            std::fputc('\n', stderr);                                                                                  \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (0)
