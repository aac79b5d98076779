// Measures what an access and a transfer cost the thread of a program, on the simulated device in real time and on the host,
// and prints it as JSON. `farpool bench device` runs it. There is no interpreter in this process.
//
//     device_speed ROUNDS ACCESSES TRANSFERS
#include <cstdio>
#include <cstdlib>

#include "core/queue.hpp"
#include "tests/device_world.hpp"

using namespace farpool;
using namespace farpool::testing;

namespace {

constexpr std::int64_t block_bytes = 64 << 10;
constexpr std::int64_t resident = 8;
constexpr std::int64_t blocks = 4 * resident;
constexpr double rate = 2e9;  // bytes per second of the link
constexpr double computed_seconds = 3 * block_bytes / rate;
constexpr int counted = 1000;

double thread_seconds() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// What a look at that clock costs: it is a call of the system, unlike the other one.
double look_seconds() {
    const double begun = thread_seconds();
    for (int look = 1; look < counted; ++look) {
        thread_seconds();
    }
    return (thread_seconds() - begun) / counted;
}

struct Seconds {
    double passed;
    double of_thread;
};

// Times `body`, and divides by `count`.
template <typename Body>
Seconds timed(int count, Body body) {
    const Seconds begun{monotonic_seconds(), thread_seconds()};
    body();
    return {(monotonic_seconds() - begun.passed) / count, (thread_seconds() - begun.of_thread) / count};
}

// A program that makes accesses to blocks, on the device or on the host.
class Program {
public:
    // `launch`: queues a kernel that takes so many seconds; does nothing on the host.
    Program(pager::Driver& driver, ProgramStream stream, std::function<void(double)> launch)
        : driver_(driver), stream_(stream), launch_(std::move(launch)) {
        const std::vector<std::int64_t> sizes(blocks, block_bytes);
        auto held = driver_.lock(pause_);
        driver_.pager().create(sizes, 0);
        held.unlock();
        for (std::int64_t block = 0; block < blocks; ++block) {
            access(block, pager::Mode::overwrite);
        }
    }

    // Returns the seconds of the thread that launching a kernel of so many seconds took, if there is one.
    double access(std::int64_t block, pager::Mode mode, double kernel = 0) {
        auto held = driver_.lock(pause_);
        const auto access = driver_.request({{static_cast<pager::BlockId>(block), 1, mode, -1}}, stream_);
        if (!access->granted && driver_.await(held, *access, monotonic_seconds() + patience, pause_) != pager::Wait::granted) {
            std::fprintf(stderr, "device_speed: an access was not granted\n");
            std::exit(1);
        }
        double launching = 0;
        if (kernel > 0) {
            held.unlock();
            const double begun = thread_seconds();
            launch_(kernel);
            launching = thread_seconds() - begun;
            held.lock();
        }
        driver_.release(*access);
        return launching;
    }
    // So many accesses to the first `most` blocks in turn.
    void loop(int accesses, std::int64_t most) {
        for (int done = 0; done < accesses; ++done) {
            access(done % most, pager::Mode::read);
        }
    }
    // So many accesses to all blocks in turn. The device computes for a fixed time in each, which leaves the link the time that
    // it needs, and the host computes for as long. Returns what the accesses took of the thread's time, without the launches.
    double compute(int accesses) {
        double seconds = -2 * look_seconds() * accesses;
        for (int done = 0; done < accesses; ++done) {
            const double until = monotonic_seconds() + computed_seconds;
            const double begun = thread_seconds();
            const double launching = access(done % blocks, pager::Mode::read, computed_seconds);
            seconds += thread_seconds() - begun - launching;
            while (monotonic_seconds() < until) {
            }
        }
        return seconds;
    }
    // What a transfer takes of the thread's time, if `work` makes so many accesses and returns its time: the accesses alone
    // take `each`.
    template <typename Work>
    double transfer_seconds(int accesses, double each, Work work) {
        const std::int64_t before = transfers();
        const double taken = work();
        return (taken - accesses * each) / static_cast<double>(transfers() - before);
    }
    std::int64_t transfers() {
        auto held = driver_.lock(pause_);
        std::int64_t sum = 0;
        for (const auto& [link, total] : driver_.links()) {
            sum += total.transfers;
        }
        return sum;
    }

private:
    pager::Driver& driver_;
    ProgramStream stream_;
    std::function<void(double)> launch_;
    pager::Pause pause_;
};

std::shared_ptr<pager::Pager> make_pager(bool device) {
    std::vector<std::shared_ptr<pager::Space>> spaces{std::make_shared<SimulatedSpace>(2 * blocks * block_bytes)};
    return std::make_shared<pager::Pager>(resident * block_bytes, std::move(spaces), 1, 64, 1 << 12, true, device);
}

// What waking a thread that sleeps costs the one that wakes it: a transfer costs a program's thread that at least.
double wake_seconds(int count) {
    std::atomic<int> turns = 0;
    std::thread sleeper([&] {
        for (int seen = 0; seen < count; seen = turns) {
            turns.wait(seen);
        }
    });
    double seconds = 0;
    for (int turn = 0; turn < count; ++turn) {
        for (const double until = monotonic_seconds() + computed_seconds; monotonic_seconds() < until;) {
        }
        const double begun = thread_seconds();
        ++turns;
        turns.notify_one();
        seconds += thread_seconds() - begun;
    }
    sleeper.join();
    return seconds / count;
}

// The calls of the driver that a resident access makes, without anything around them.
void call_driver(const device::CudaDriver& driver, device::Stream stream, void* event, int count) {
    auto* const stream_id = reinterpret_cast<int (*)(void*, unsigned long long*)>(driver.library.find("cuStreamGetId"));
    void* context = nullptr;
    int capturing = 0;
    unsigned long long id = 0;
    for (int done = 0; done < count; ++done) {
        driver.context_get(&context);
        driver.stream_capturing(stream, &capturing);
        stream_id(stream, &id);
        driver.context_get(&context);
        driver.event_record(event, stream);
    }
}

std::uint64_t calls_of_accesses() {
    std::uint64_t sum = 0;
    for (const char* name : {"cuCtxGetCurrent", "cuCtxSetCurrent", "cuStreamIsCapturing", "cuStreamGetId", "cuEventRecord",
                             "cuEventCreate", "cuStreamWaitEvent"}) {
        sum += calls(name);
    }
    return sum;
}

void print(const char* name, const std::vector<double>& samples) {
    std::printf("\"%s\": [", name);
    for (std::size_t one = 0; one < samples.size(); ++one) {
        std::printf("%s%.4g", one == 0 ? "" : ", ", samples[one]);
    }
    std::printf("],\n");
}

void print(const std::string& name, const std::vector<Seconds>& samples) {
    std::vector<double> passed, of_thread;
    for (const Seconds& one : samples) {
        passed.push_back(one.passed);
        of_thread.push_back(one.of_thread);
    }
    print((name + "_passed").c_str(), passed);
    print(name.c_str(), of_thread);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) {
        std::fprintf(stderr, "usage: device_speed ROUNDS ACCESSES TRANSFERS\n");
        return 2;
    }
    const int rounds = std::atoi(argv[1]);
    const int accesses = std::atoi(argv[2]);
    const int wanted = std::atoi(argv[3]);

    World world({.real_time_rate = rate,
                 .capacity = resident * block_bytes,
                 .page_locked = 2 * blocks * block_bytes,
                 .locked_chunk = 2 * blocks * block_bytes,
                 .staging = 4 << 20,
                 .chunk = 1 << 20});
    Program on_device(*world.driver, world.handle(0),
                      [&](double seconds) { fake_cuda().launch(world.streams[0], [](void*) {}, nullptr, seconds); });
    const device::CudaDriver driver(FAKE_CUDA_PATH);
    const device::Event event = world.cuda->make_event();

    Memory arena(resident * block_bytes);
    Memory tier(2 * blocks * block_bytes);
    MemoryPort port(tier);
    const auto queue = std::make_shared<QueueCore>();
    pager::Driver host(make_pager(false), queue, reinterpret_cast<std::uintptr_t>(arena.data()));
    host.add_port(&port);
    Program on_host(host, 0, [](double) {});

    std::vector<Seconds> device_access, host_access, driver_calls;
    std::vector<double> computed, waited, host_computed, wakes;  // seconds of the thread for a transfer
    for (int round = 0; round < rounds; ++round) {
        for (auto& [program, samples] : {std::pair(&on_host, &host_access), std::pair(&on_device, &device_access)}) {
            program->loop(2 * resident, resident);
            samples->push_back(timed(accesses, [&, program = program] { program->loop(accesses, resident); }));
        }
        driver_calls.push_back(timed(accesses, [&] { call_driver(driver, world.streams[0], event, accesses); }));
        wakes.push_back(wake_seconds(counted));
        on_device.loop(3 * blocks, blocks);  // the pager learns the loop
        const double each = device_access.back().of_thread;
        waited.push_back(on_device.transfer_seconds(
            wanted, each, [&] { return timed(1, [&] { on_device.loop(wanted, blocks); }).of_thread; }));
        on_device.compute(3 * blocks);  // and how long the device computes
        computed.push_back(on_device.transfer_seconds(wanted, each, [&] { return on_device.compute(wanted); }));
        on_host.loop(3 * blocks, blocks);
        host_computed.push_back(
            on_host.transfer_seconds(wanted, host_access.back().of_thread, [&] { return on_host.compute(wanted); }));
    }
    std::printf("{\n");
    print(std::string("host_access"), host_access);
    print(std::string("device_access"), device_access);
    print(std::string("driver_calls"), driver_calls);
    print("wake", wakes);
    print("transfer", computed);
    print("waited_transfer", waited);
    print("host_transfer", host_computed);
    on_device.loop(2 * resident, resident);
    const std::uint64_t before = calls_of_accesses();
    on_device.loop(counted, resident);
    std::printf("\"calls_per_access\": %.3f\n}\n", static_cast<double>(calls_of_accesses() - before) / counted);
    world.cuda->end_event(event);
    queue->close(patience);
    world.close();
    return 0;
}
