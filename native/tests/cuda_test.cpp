// A CUDA device over a simulated driver, which runs queued work in the worst order that CUDA permits.
#include "device/cuda.hpp"

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/error.hpp"
#include "tests/fake_cuda/control.hpp"
#include "tests/testing.hpp"

namespace {

using farpool::ErrorKind;
using farpool::PortFailure;
using farpool::device::Cuda;
using farpool::device::CudaDriver;
using farpool::device::Event;
using farpool::device::open_cuda;
using farpool::device::Stream;

constexpr int copies_first = 0, compute_first = 1, latest_possible = 2, any_order = 3;
constexpr std::size_t page = 4096;

const farpool::fake::Fake& fake() {
    static const farpool::fake::Fake one(FAKE_CUDA_PATH);
    return one;
}

const CudaDriver& raw() {
    static const CudaDriver one(FAKE_CUDA_PATH);
    return one;
}

std::shared_ptr<Cuda> fresh(std::uint64_t seed = 1, int policy = any_order) {
    fake().reset(seed, policy);
    auto device = open_cuda(0, FAKE_CUDA_PATH);
    device->enter();
    return device;
}

// Page-locked memory, until its end.
struct Locked {
    Locked(Cuda& device, std::size_t nbytes)
        : device(device), size(nbytes), bytes(static_cast<unsigned char*>(std::aligned_alloc(page, nbytes))) {
        std::memset(bytes, 0, nbytes);
        device.lock_pages(bytes, nbytes);
    }
    Locked(const Locked&) = delete;
    ~Locked() {
        device.unlock_pages(bytes);
        std::free(bytes);
    }
    bool all(unsigned char value) const {
        for (std::size_t one = 0; one < size; ++one) {
            if (bytes[one] != value) {
                return false;
            }
        }
        return true;
    }

    Cuda& device;
    std::size_t size;
    unsigned char* bytes;
};

// Memory of the device that kernels fill with a byte.
struct Room {
    Room(Cuda& device, std::size_t nbytes) : device(device), size(nbytes), address(device.allocate(nbytes)) {}
    Room(const Room&) = delete;
    ~Room() { device.free(address); }

    Cuda& device;
    std::size_t size;
    std::uintptr_t address;
    unsigned char value = 0;
};

void fill_room(void* data) {
    auto* const room = static_cast<Room*>(data);
    std::memset(reinterpret_cast<void*>(room->address), ++room->value, room->size);
}

// The text of the error that a call throws, which must be one of the tier "cuda".
template <typename Call>
std::string error_of(Call call) {
    try {
        call();
    } catch (const PortFailure& failure) {
        CHECK(failure.error().kind == ErrorKind::tier);
        CHECK_EQUAL(failure.error().tier, "cuda");
        CHECK_EQUAL(failure.error().code, 0);
        return failure.what();
    }
    return "no error";
}

void check_has(const std::string& text, const std::vector<std::string>& parts) {
    for (const auto& part : parts) {
        if (text.find(part) == std::string::npos) {
            farpool::testing::fail("'" + text + "' lacks '" + part + "'", __FILE__, __LINE__);
        }
    }
}

// Runs a function on a new thread, which knows no context, and throws what it threw.
template <typename Body>
void in_thread(Body body) {
    std::exception_ptr thrown;
    std::thread([&] {
        try {
            body();
        } catch (...) {
            thrown = std::current_exception();
        }
    }).join();
    if (thrown != nullptr) {
        std::rethrow_exception(thrown);
    }
}

void* current_context() {
    void* context = nullptr;
    CHECK_EQUAL(raw().context_get(&context), 0);
    return context;
}

// The capture mode of this thread, which stays as it is.
int capture_mode() {
    int mode = 0;
    CHECK_EQUAL(raw().exchange_capture_mode(&mode), 0);
    int other = mode;
    CHECK_EQUAL(raw().exchange_capture_mode(&other), 0);
    return mode;
}

// Kernels on one stream write a room twice, and each time a copy on another stream takes its bytes out. This needs two waits:
// the copy's for the kernel, and the next kernel's for the copy. Returns whether both copies had the right bytes.
bool take_out_twice(std::uint64_t seed, int policy, int left_out) {
    auto device = fresh(seed, policy);
    Stream const compute = device->make_stream();
    Stream const copies = device->make_stream();
    Event const written = device->make_event();
    Event const copied = device->make_event();
    bool right = true;
    {
        Room room(*device, 2 * page);
        Locked first(*device, room.size);
        Locked second(*device, room.size);
        for (Locked* host : {&first, &second}) {
            if (left_out != 1) {
                device->wait(compute, copied);
            }
            CHECK_EQUAL(fake().launch(compute, fill_room, &room, 1e-3), 0);
            device->record(written, compute);
            if (left_out != 0) {
                device->wait(copies, written);
            }
            device->copy_out(copies, host->bytes, room.address, room.size);
            device->record(copied, copies);
        }
        device->synchronize(copied);
        device->synchronize(written);
        right = first.all(1) && second.all(2);
    }
    device->end_event(written);
    device->end_event(copied);
    device->end_stream(compute);
    device->end_stream(copies);
    CHECK_EQUAL(fake().violations(), "");
    return right;
}

}  // namespace

TEST("copies and fills are done in the order of their stream") {
    for (int policy = copies_first; policy <= any_order; ++policy) {
        auto device = fresh(7, policy);
        Stream const stream = device->make_stream();
        Event const done = device->make_event();
        CHECK(device->passed(done));
        {
            Room room(*device, 4 * page);
            Locked source(*device, page);
            Locked target(*device, 4 * page);
            std::memset(source.bytes, 5, page);
            device->fill(stream, room.address, 0x0909, 2 * page);
            device->copy_in(stream, room.address, source.bytes, page);
            device->copy_within(stream, room.address + 2 * page, room.address, page);
            device->copy_out(stream, target.bytes, room.address, 4 * page);
            device->record(done, stream);
            CHECK(target.all(0));
            device->synchronize(done);
            CHECK(device->passed(done));
            const unsigned char expected[] = {5, 9, 5, 9};
            for (std::size_t one = 0; one < 4 * page; ++one) {
                CHECK_EQUAL(int{target.bytes[one]}, int{expected[one / page]});
            }
        }
        device->end_event(done);
        device->end_stream(stream);
        CHECK_EQUAL(fake().violations(), "");
    }
}

TEST("nothing is done before the host looks, and a query ends by seeing that an event has passed") {
    auto device = fresh();
    Event const done = device->make_event();
    Room room(*device, page);
    for (int one = 0; one < 10; ++one) {
        CHECK_EQUAL(fake().launch(nullptr, fill_room, &room, 0), 0);
    }
    device->record(done, nullptr);
    CHECK_EQUAL(int{room.value}, 0);
    int queries = 0;
    while (!device->passed(done)) {
        CHECK(++queries < 1000);
    }
    CHECK(queries >= 5);  // each sees at most two operations done
    CHECK_EQUAL(int{room.value}, 10);
    CHECK_EQUAL(fake().calls("cuEventQuery"), static_cast<std::uint64_t>(queries) + 1);
}

TEST("events tell the seconds of the work between them") {
    auto device = fresh();
    fake().set(fake_rate, 1e6);
    fake().set(fake_host_time, 100);
    Stream const stream = device->make_stream();
    Stream const other = device->make_stream();
    const std::array<Event, 4> at = {device->make_event(), device->make_event(), device->make_event(), device->make_event()};
    Room room(*device, page);
    device->record(at[0], stream);
    device->fill(stream, room.address, 0, page / 2);
    device->record(at[1], stream);
    device->wait(other, at[1]);
    CHECK_EQUAL(fake().launch(other, fill_room, &room, 0.25), 0);
    device->record(at[2], other);
    fake().set(fake_host_time, 107);
    device->record(at[3], stream);
    check_has(error_of([&] { device->elapsed(at[0], at[3]); }), {"cuEventElapsedTime", "CUDA_ERROR_NOT_READY"});
    device->synchronize(at[2]);
    device->synchronize(at[3]);
    const auto near = [](double left, double right) { return left > right - 1e-6 && left < right + 1e-6; };
    CHECK(near(device->elapsed(at[0], at[1]), page / 1e6));
    CHECK(near(device->elapsed(at[1], at[2]), 0.25));
    CHECK(near(device->elapsed(at[0], at[3]), 7));
}

TEST("a wait is for the record that was there when it was queued, and for nothing if there was none") {
    auto device = fresh(3, latest_possible);
    Stream const one = device->make_stream();
    Stream const two = device->make_stream();
    Event const event = device->make_event();
    Event const done = device->make_event();
    Room early(*device, page);
    Room late(*device, page);
    device->wait(two, event);
    CHECK_EQUAL(fake().launch(one, fill_room, &early, 0), 0);
    device->record(event, one);
    device->wait(two, event);
    CHECK_EQUAL(fake().launch(one, fill_room, &late, 0), 0);
    device->record(event, one);
    device->record(done, two);
    device->synchronize(done);
    CHECK_EQUAL(int{early.value}, 1);
    CHECK_EQUAL(int{late.value}, 0);
    device->synchronize(event);
    CHECK_EQUAL(int{late.value}, 1);
}

TEST("events order the work of two streams, whatever the device does first") {
    for (int policy = copies_first; policy <= any_order; ++policy) {
        for (std::uint64_t seed = 0; seed < 50; ++seed) {
            CHECK(take_out_twice(seed, policy, -1));
        }
    }
}

TEST("a wait that is left out gives wrong bytes in some order") {
    for (int left_out = 0; left_out < 2; ++left_out) {
        std::array<int, 4> wrong = {};
        for (int policy = copies_first; policy <= any_order; ++policy) {
            for (std::uint64_t seed = 0; seed < 50; ++seed) {
                wrong[static_cast<std::size_t>(policy)] += !take_out_twice(seed, policy, left_out);
            }
        }
        // Copies that run too early miss the kernel before them; kernels that run too early spoil the copy before them.
        CHECK_EQUAL(wrong[left_out == 0 ? copies_first : compute_first], 50);
        CHECK(left_out != 0 || wrong[latest_possible] == 50);
        CHECK(wrong[any_order] > 5);
    }
}

TEST("a copy that is not waited for can be seen half done") {
    struct Look {
        const unsigned char* bytes;
        bool half;
    };
    int halves = 0;
    for (std::uint64_t seed = 0; seed < 50; ++seed) {
        auto device = fresh(seed, any_order);
        Stream const stream = device->make_stream();
        Event const done = device->make_event();
        Room room(*device, 2 * page);
        Locked source(*device, room.size);
        std::memset(source.bytes, 3, source.size);
        std::memset(reinterpret_cast<void*>(room.address), 0, room.size);
        Look look{reinterpret_cast<unsigned char*>(room.address), false};
        device->copy_in(stream, room.address, source.bytes, room.size);
        device->record(done, stream);
        const auto see = [](void* data) {
            auto* const one = static_cast<Look*>(data);
            one->half = one->bytes[0] == 3 && one->bytes[2 * page - 1] == 0;
        };
        CHECK_EQUAL(fake().launch(nullptr, see, &look, 0), 0);
        device->synchronize(done);
        fake().advance(10);
        halves += look.half;
    }
    CHECK(halves > 5 && halves < 45);
}

TEST("a missing, foreign or old driver is named with a remedy") {
    check_has(error_of([] { open_cuda(0, "/nowhere/libcuda.so.1"); }),
              {"cuda: no CUDA driver", "/nowhere/libcuda.so.1", "install the NVIDIA driver, or use device='cpu'"});
    check_has(error_of([] { open_cuda(0, "libc.so.6"); }), {"libc.so.6 is no CUDA driver", "cuDriverGetVersion"});
    check_has(error_of([] { open_cuda(0, OLD_CUDA_PATH); }),
              {"the driver is too old (CUDA 10.1, without cu", "farpool needs CUDA 11.4 or newer", "update"});
    fake().reset(1, any_order);
    fake().set(fake_version, 11020);
    check_has(error_of([] { open_cuda(0, FAKE_CUDA_PATH); }), {"too old (CUDA 11.2)", "CUDA 11.4 or newer"});
}

TEST("a device that does not exist is named, and nothing is retained for it") {
    fake().reset(1, any_order);
    check_has(error_of([] { open_cuda(2, FAKE_CUDA_PATH); }), {"no device 2", "sees 2 devices", "CUDA_VISIBLE_DEVICES"});
    check_has(error_of([] { open_cuda(-1, FAKE_CUDA_PATH); }), {"no device -1"});
    fake().fail_call("cuInit", 1, 100);
    check_has(error_of([] { open_cuda(0, FAKE_CUDA_PATH); }),
              {"cuInit: error 100 CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES", "device='cpu'"});
    fake().fail_call("cuInit", 1, 3);
    check_has(error_of([] { open_cuda(0, FAKE_CUDA_PATH); }), {"a forked process cannot use CUDA"});
    CHECK_EQUAL(fake().calls("cuDevicePrimaryCtxRetain"), 0U);
}

TEST("two devices have contexts of their own, which are released at their end") {
    auto first = fresh();
    void* const context = current_context();
    {
        const auto again = open_cuda(0, FAKE_CUDA_PATH);
        const auto second = open_cuda(1, FAKE_CUDA_PATH);
        again->enter();
        CHECK(current_context() == context);
        second->enter();
        CHECK(current_context() != context);
        Event const event = second->make_event();
        Stream const stream = second->make_stream();
        second->record(event, stream);
        second->synchronize(event);
        first->enter();
        CHECK(current_context() == context);
        Stream const other = first->make_stream();
        check_has(error_of([&] { first->record(event, other); }), {"cuEventRecord", "CUDA_ERROR_INVALID_HANDLE"});
    }
    CHECK_EQUAL(fake().calls("cuDevicePrimaryCtxRelease_v2"), 2U);
    Stream const stream = first->make_stream();  // its context is still retained
    first->end_stream(stream);
    first.reset();
    CHECK_EQUAL(raw().context_set(context), 201);
    CHECK_EQUAL(fake().violations(), "cuEventRecord: the stream belongs to another context\n");
}

TEST("the errors of a refused call have its name, CUDA's and a remedy") {
    auto device = fresh();
    fake().set(fake_device_limit, 1000);
    fake().set(fake_locked_limit, 2 * page);
    const auto room = device->allocate(600);
    check_has(error_of([&] { device->allocate(500); }),
              {"cuMemAlloc_v2: error 2 CUDA_ERROR_OUT_OF_MEMORY", "500 bytes", "400 of its 1000 are free", "lower the budget"});
    check_has(error_of([&] { device->allocate(0); }), {"CUDA_ERROR_INVALID_VALUE", "allocating 0 bytes"});
    device->free(room);
    device->free(device->allocate(1000));
    {
        Locked memory(*device, page);
        alignas(page) static unsigned char more[2 * page];
        check_has(error_of([&] { device->lock_pages(more, sizeof more); }),
                  {"cuMemHostRegister_v2: error 2", "8192 bytes", "use less host memory", "ulimit -l"});
        check_has(error_of([&] { device->lock_pages(memory.bytes, page); }), {"ALREADY_REGISTERED", "page-locking 4096 bytes"});
        device->lock_pages(more, page);
        device->unlock_pages(more);
    }
    fake().fail_call("cuStreamCreate", 2, 12345);
    device->end_stream(device->make_stream());
    CHECK_EQUAL(error_of([&] { device->make_stream(); }), "cuda: cuStreamCreate: error 12345");
    device->end_stream(device->make_stream());
    CHECK_EQUAL(fake().violations(), "");
}

TEST("each call reports that the driver refused it") {
    auto device = fresh();
    Stream const stream = device->make_stream();
    Event const event = device->make_event();
    Room room(*device, page);
    Locked memory(*device, page);
    const auto to = room.address;
    const std::vector<std::pair<const char*, std::function<void()>>> calls = {
        {"cuStreamCreate", [&] { device->make_stream(); }},
        {"cuEventCreate", [&] { device->make_event(); }},
        {"cuEventRecord", [&] { device->record(event, stream); }},
        {"cuStreamWaitEvent", [&] { device->wait(stream, event); }},
        {"cuEventQuery", [&] { device->passed(event); }},
        {"cuEventSynchronize", [&] { device->synchronize(event); }},
        {"cuEventElapsedTime", [&] { device->elapsed(event, event); }},
        {"cuMemcpyHtoDAsync_v2", [&] { device->copy_in(stream, to, memory.bytes, page); }},
        {"cuMemcpyDtoHAsync_v2", [&] { device->copy_out(stream, memory.bytes, to, page); }},
        {"cuMemcpyDtoDAsync_v2", [&] { device->copy_within(stream, to, to + page / 2, page / 2); }},
        {"cuMemsetD16Async", [&] { device->fill(stream, to, 0, 1); }},
        {"cuStreamIsCapturing", [&] { device->capturing(stream); }},
        {"cuMemHostRegister_v2", [&] { device->lock_pages(memory.bytes, page); }},
        {"cuMemAlloc_v2", [&] { device->allocate(page); }},
        {"cuThreadExchangeStreamCaptureMode", [&] { Cuda::Entered entered(*device); }},
        {"cuCtxSetCurrent", [&] { Cuda::Entered entered(*device); }},
        {"cuCtxGetCurrent", [&] { Cuda::Entered entered(*device); }},
    };
    for (const auto& [name, call] : calls) {
        fake().fail_call(name, 1, 700);
        check_has(error_of(call), {std::string("cuda: ") + name + ": error 700 CUDA_ERROR_ILLEGAL_ADDRESS (text of the fake)",
                                   "restart the process"});
    }
    CHECK_EQUAL(fake().advance(10), 0U);
    CHECK_EQUAL(fake().violations(), "");
}

TEST("after the loss of the device every call fails and says so") {
    auto device = fresh();
    Stream const stream = device->make_stream();
    Event const done = device->make_event();
    Locked memory(*device, page);
    Room room(*device, page);
    fake().set(fake_copies_until_failure, 2);
    device->copy_in(stream, room.address, memory.bytes, page);
    device->copy_in(stream, room.address, memory.bytes, page);
    device->record(done, stream);
    const std::vector<std::string> lost = {"error 719 CUDA_ERROR_LAUNCH_FAILED", "restart the process"};
    check_has(error_of([&] { device->synchronize(done); }), lost);
    check_has(error_of([&] { device->passed(done); }), lost);
    check_has(error_of([&] { device->record(done, stream); }), lost);
    check_has(error_of([&] { device->allocate(page); }), lost);
    device->end_event(done);
    device->end_stream(stream);
    fake().fail_call("cuEventQuery", 1, 214);
    check_has(error_of([&] { device->passed(done); }), {"CUDA_ERROR_ECC_UNCORRECTABLE", "restart the process"});
}

TEST("a thread enters once, and only then may it call") {
    auto device = fresh();
    const auto sets = fake().calls("cuCtxSetCurrent");
    in_thread([&] {
        check_has(error_of([&] { device->make_stream(); }), {"cuStreamCreate: error 201 CUDA_ERROR_INVALID_CONTEXT"});
        for (int one = 0; one < 5; ++one) {
            device->enter();
        }
        CHECK_EQUAL(capture_mode(), 2);
        device->end_stream(device->make_stream());
    });
    CHECK_EQUAL(fake().calls("cuCtxSetCurrent"), sets + 1);
    device->enter();
    CHECK_EQUAL(fake().calls("cuCtxSetCurrent"), sets + 1);
    fake().fail_call("cuCtxSetCurrent", 1, 201);
    in_thread([&] {
        check_has(error_of([&] { device->enter(); }), {"cuCtxSetCurrent"});
        device->enter();  // tries again
        device->end_stream(device->make_stream());
    });
}

TEST("a thread of the program gets back its context and its capture mode") {
    auto device = fresh();
    const auto other = open_cuda(1, FAKE_CUDA_PATH);
    in_thread([&] {
        {
            Cuda::Entered entered(*device);
            CHECK(current_context() != nullptr);
            CHECK_EQUAL(capture_mode(), 2);
            {
                Cuda::Entered inner(*other);
                other->end_stream(other->make_stream());
            }
            device->enter();  // a function inside that enters for good does not change the context that is given back
        }
        CHECK(current_context() == nullptr);
        CHECK_EQUAL(capture_mode(), 0);
        fake().fail_call("cuThreadExchangeStreamCaptureMode", 1, 1);
        check_has(error_of([&] { Cuda::Entered entered(*device); }), {"cuThreadExchangeStreamCaptureMode: error 1"});
        CHECK(current_context() == nullptr);
        device->enter();
        void* const context = current_context();
        CHECK(context != nullptr);
        CHECK_EQUAL(capture_mode(), 2);
        {
            Cuda::Entered entered(*other);
            CHECK(current_context() != context);
            device->enter();
            CHECK(current_context() == context);
        }
        CHECK(current_context() == context);
    });
}

TEST("a new thread of the program is attached, and what a thread has set is kept") {
    auto device = fresh();
    void* const context = current_context();
    const auto other = open_cuda(1, FAKE_CUDA_PATH);
    Stream const stream = device->make_stream();
    Event const event = device->make_event();
    in_thread([&] {
        check_has(error_of([&] { device->record(event, stream); }), {"CUDA_ERROR_INVALID_CONTEXT"});
        {
            Cuda::Entered entered(*device);
            const farpool::device::Attached attached(*device);
        }
        CHECK(current_context() == nullptr);
        for (int turn = 0; turn < 2; ++turn) {
            const farpool::device::Attached attached(*device);
            device->record(event, stream);
            device->wait(stream, event);
            CHECK(!device->capturing(stream));
        }
        CHECK(current_context() == context);
        CHECK_EQUAL(capture_mode(), 0);
        {
            const farpool::device::Attached attached(*other);
            CHECK(current_context() != context);
        }
        CHECK(current_context() == context);
        device->record(event, stream);
    });
    CHECK_EQUAL(fake().violations(), "");
}

TEST("a device that is opened again has the context that threads know") {
    auto device = fresh();
    void* const context = current_context();
    device.reset();
    CHECK_EQUAL(raw().context_set(context), 201);
    device = open_cuda(0, FAKE_CUDA_PATH);
    device->attach();
    device->end_stream(device->make_stream());
    CHECK(current_context() == context);
}

TEST("a capture of the program is seen, and the calls of an entered thread do not break it") {
    auto device = fresh();
    Stream const program = device->make_stream();
    Event const event = device->make_event();
    CHECK(!device->capturing(program));
    CHECK(!device->capturing(nullptr));
    CHECK_EQUAL(fake().capture(program, 1), 0);
    CHECK(device->capturing(program));
    CHECK(!device->capturing(nullptr));  // farpool's streams do not wait for the default stream
    CHECK(device->passed(event));
    device->synchronize(event);
    device->free(device->allocate(page));
    CHECK_EQUAL(fake().capture(program, 0), 0);
    CHECK_EQUAL(fake().violations(), "");

    void* blocking = nullptr;
    CHECK_EQUAL(raw().stream_create(&blocking, 0U), 0);
    CHECK_EQUAL(fake().capture(blocking, 1), 0);
    CHECK(device->capturing(nullptr));
    in_thread([&] {
        CHECK_EQUAL(raw().context_set(nullptr), 0);
        Cuda::Entered* entered = new Cuda::Entered(*device);
        CHECK(device->passed(event));
        int strict = 0;  // as if the thread had not entered
        CHECK_EQUAL(raw().exchange_capture_mode(&strict), 0);
        check_has(error_of([&] { device->passed(event); }), {"error 900", "capture_error_mode='thread_local'"});
        delete entered;
    });
    CHECK_EQUAL(fake().capture(blocking, 0), 901);
    check_has(fake().violations(), {"cuEventQuery: forbidden while a graph is captured"});
}

TEST("the fake reports what a correct program does not do") {
    auto device = fresh();
    Stream const stream = device->make_stream();
    Event const event = device->make_event();
    Room room(*device, 2 * page);
    unsigned char loose[16] = {};
    device->copy_in(stream, room.address, loose, sizeof loose);
    check_has(error_of([&] { device->copy_within(stream, room.address, room.address + 8, 9); }), {"INVALID_VALUE"});
    const auto freed = device->allocate(page);
    device->fill(stream, freed, 0, 1);
    fake().fail_call("cuMemFree_v2", 1, 1);
    device->free(freed);
    fake().advance(10);
    device->free(freed);
    CHECK_EQUAL(fake().capture(stream, 1), 0);
    device->record(event, stream);
    CHECK_EQUAL(fake().capture(stream, 0), 0);
    CHECK(device->passed(event));
    void* spinning = nullptr;
    CHECK_EQUAL(raw().event_create(&spinning, 0U), 0);
    device->synchronize(spinning);
    device->end_event(event);
    device->end_event(event);
    check_has(error_of([&] { device->record(event, stream); }), {"CUDA_ERROR_INVALID_HANDLE"});
    device->end_stream(stream);
    check_has(error_of([&] { device->capturing(stream); }), {"CUDA_ERROR_INVALID_HANDLE"});
    CHECK_EQUAL(fake().violations(),
                "cuMemcpyHtoDAsync_v2: host memory that is not page-locked\n"
                "cuMemcpyDtoDAsync_v2: the ranges overlap\n"
                "cuEventRecord: work went into a graph instead of being done\n"
                "cuEventSynchronize: spins, because the event was made without blocking synchronization\n"
                "cuEventDestroy_v2: the event was destroyed or never made\n"
                "cuEventRecord: the event was destroyed or never made\n"
                "cuStreamIsCapturing: the stream was destroyed or never made\n");
}

TEST("work that is queued when its stream ends is done all the same") {
    auto device = fresh(1, latest_possible);
    Stream const stream = device->make_stream();
    Event const done = device->make_event();
    Room room(*device, page);
    CHECK_EQUAL(fake().launch(stream, fill_room, &room, 0), 0);
    device->record(done, stream);
    device->end_stream(stream);
    device->synchronize(done);
    CHECK_EQUAL(int{room.value}, 1);
}

namespace {

// Several threads copy through rooms of their own, and one kernel stream of all threads writes these rooms before.
void copy_in_threads(Cuda& device) {
    Stream const compute = device.make_stream();
    std::vector<std::thread> threads;
    std::atomic<int> wrong = 0;
    for (int thread = 0; thread < 4; ++thread) {
        threads.emplace_back([&] {
            device.enter();
            Stream const stream = device.make_stream();
            Event const written = device.make_event();
            Event const copied = device.make_event();
            {
                Room room(device, 2 * page);
                Locked host(device, room.size);
                for (int turn = 1; turn <= 50; ++turn) {
                    device.wait(compute, copied);
                    wrong += fake().launch(compute, fill_room, &room, 0) != 0;
                    device.record(written, compute);
                    device.wait(stream, written);
                    device.copy_out(stream, host.bytes, room.address, room.size);
                    device.record(copied, stream);
                    while (turn % 2 == 0 && !device.passed(copied)) {
                        std::this_thread::yield();
                    }
                    device.synchronize(copied);
                    wrong += !host.all(static_cast<unsigned char>(turn));
                }
            }
            device.end_event(written);
            device.end_event(copied);
            device.end_stream(stream);
        });
    }
    for (auto& thread : threads) {
        thread.join();
    }
    device.end_stream(compute);
    CHECK_EQUAL(wrong.load(), 0);
    CHECK_EQUAL(fake().violations(), "");
}

}  // namespace

TEST("several threads use one device at once") {
    for (int policy = copies_first; policy <= any_order; ++policy) {
        copy_in_threads(*fresh(11, policy));
    }
}

TEST("in real time each stream has a thread, and work takes the time of the link") {
    auto device = fresh();
    fake().set(fake_real_time_rate, 1e9);
    copy_in_threads(*device);
    Stream const stream = device->make_stream();
    Event const from = device->make_event();
    Event const to = device->make_event();
    {
        Room room(*device, 256 * page);
        Locked host(*device, room.size);
        std::memset(host.bytes, 8, host.size);
        device->record(from, stream);
        device->copy_in(stream, room.address, host.bytes, room.size);
        device->record(to, stream);
        device->synchronize(to);
        CHECK_EQUAL(int{reinterpret_cast<unsigned char*>(room.address)[room.size - 1]}, 8);
        CHECK(device->elapsed(from, to) >= static_cast<double>(room.size) / 1e9 - 1e-6);
    }
    fake().set(fake_copies_until_failure, 1);
    Locked host(*device, page);
    device->copy_out(stream, host.bytes, reinterpret_cast<std::uintptr_t>(host.bytes), 1);
    const auto fails = [&] {
        device->record(to, stream);  // fails if the copy has failed by now
        device->synchronize(to);
    };
    check_has(error_of(fails), {"error 719"});
    fake().reset(1, any_order);
}

int main() { return farpool::testing::run(); }
