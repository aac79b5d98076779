// A minimal unit test library: named cases, checks that print what they compared, one exit status.
#pragma once

#include <cstdio>
#include <exception>
#include <functional>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace farpool::testing {

inline std::vector<std::pair<std::string, std::function<void()>>>& cases() {
    static std::vector<std::pair<std::string, std::function<void()>>> all;
    return all;
}

struct Case {
    Case(std::string name, std::function<void()> body) { cases().emplace_back(std::move(name), std::move(body)); }
};

[[noreturn]] inline void fail(const std::string& what, const char* file, int line) {
    throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <typename Left, typename Right>
void check_equal(const Left& left, const Right& right, const char* text, const char* file, int line) {
    if (!(left == right)) {
        std::ostringstream what;
        what << text;
        if constexpr (requires { what << left << right; }) {
            what << ": " << left << " is not " << right;
        }
        fail(what.str(), file, line);
    }
}

inline int run() {
    int failed = 0;
    for (const auto& [name, body] : cases()) {
        try {
            body();
            std::cout << "ok      " << name << "\n";
        } catch (const std::exception& error) {
            ++failed;
            std::cout << "FAILED  " << name << "\n        " << error.what() << "\n";
        }
    }
    return failed == 0 && !cases().empty() ? 0 : 1;
}

}  // namespace farpool::testing

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEST(name)                                                                          \
    static void JOIN(case_, __LINE__)();                                                    \
    static const farpool::testing::Case JOIN(made_, __LINE__){name, JOIN(case_, __LINE__)}; \
    static void JOIN(case_, __LINE__)()
#define CHECK(condition) \
    if (!(condition)) farpool::testing::fail(#condition, __FILE__, __LINE__)
#define CHECK_EQUAL(left, right) farpool::testing::check_equal(left, right, #left " == " #right, __FILE__, __LINE__)
#define CHECK_THROWS(type, expression)                                                            \
    do {                                                                                          \
        bool thrown = false;                                                                      \
        try {                                                                                     \
            (void)(expression);                                                                   \
        } catch (const type&) {                                                                   \
            thrown = true;                                                                        \
        }                                                                                         \
        if (!thrown) farpool::testing::fail(#expression " throws no " #type, __FILE__, __LINE__); \
    } while (false)
