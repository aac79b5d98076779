// What a test tells the fake driver, in addition to the driver's own functions. `Fake` finds these functions in the library.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

extern "C" {

// Settings: memory that cuMemAlloc gives in all, and memory that may be page-locked in all; copies of more bytes run in two
// parts; the copy after which the device is lost (1: the next); number of devices; version of the driver; bytes per second of
// copies and fills; the host's time in seconds, negative for the real one; for all work queued from then on, real time at so
// many bytes per second; 1 if the host itself does what a program would queue on its default stream, so that it waits wherever
// that stream is told to wait; seconds that the device's clock gains each second, negative if it loses some; and the handle
// that the next stream gets, as a driver may use a destroyed stream's handle again.
enum FakeSetting : int {
    fake_device_limit,
    fake_locked_limit,
    fake_split_bytes,
    fake_copies_until_failure,
    fake_devices,
    fake_version,
    fake_rate,
    fake_host_time,
    fake_real_time_rate,
    fake_host_computes,
    fake_fast_clock,
    fake_next_stream,
};

// Forgets everything, and runs all work from then on by a policy: copies_first 0, compute_first 1, latest_possible 2
// (only what a wanted event needs), random 3.
void fakeReset(std::uint64_t seed, int policy);
void fakeSet(int setting, double value);
// Queues a kernel: a function that must not call the driver.
int fakeLaunch(void* stream, void (*kernel)(void*), void* data, double seconds);
// Runs up to `count` operations and returns how many there were.
std::uint64_t fakeAdvance(std::uint64_t count);
// Makes the nth call from now on of a function return a result, without doing anything.
void fakeFailCall(const char* name, std::uint64_t nth, int result);
// Begins or ends the capture of a graph; ending returns 901 if a forbidden call broke the capture.
int fakeCapture(void* stream, int begin);
std::uint64_t fakeCalls(const char* name);
// The number of calls that a correct program would not make; copies their texts, one a line.
std::uint64_t fakeViolations(char* text, std::size_t size);
}

namespace farpool::fake {

class Fake {
    void* handle_;

    template <typename Function>
    Function* find(Function*, const char* name) const {
        void* const found = dlsym(handle_, name);
        if (found == nullptr) {
            throw std::runtime_error(std::string("the fake driver has no ") + name);
        }
        return reinterpret_cast<Function*>(found);
    }

public:
    explicit Fake(const std::string& path) : handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
        if (handle_ == nullptr) {
            throw std::runtime_error(dlerror());
        }
    }

    decltype(&fakeReset) reset = find(decltype(&fakeReset){}, "fakeReset");
    decltype(&fakeSet) set = find(decltype(&fakeSet){}, "fakeSet");
    decltype(&fakeLaunch) launch = find(decltype(&fakeLaunch){}, "fakeLaunch");
    decltype(&fakeAdvance) advance = find(decltype(&fakeAdvance){}, "fakeAdvance");
    decltype(&fakeFailCall) fail_call = find(decltype(&fakeFailCall){}, "fakeFailCall");
    decltype(&fakeCapture) capture = find(decltype(&fakeCapture){}, "fakeCapture");
    decltype(&fakeCalls) calls = find(decltype(&fakeCalls){}, "fakeCalls");

    std::string violations() const {
        char text[4096];
        find(decltype(&fakeViolations){}, "fakeViolations")(text, sizeof text);
        return text;
    }
};

}  // namespace farpool::fake
