// The queue of a device under a pager and a driver, on a simulated CUDA driver that runs all work as late, as early or as
// strangely as CUDA permits. Kernels look at the bytes when they run, so each missing wait shows as wrong bytes.
#include <cstdlib>
#include <random>

#include "tests/device_world.hpp"

using namespace farpool::pager;
using namespace farpool::testing;
using farpool::device::Event;

namespace {

// What a kernel does when it runs: it compares some stretches with what they must hold, and writes others.
struct Kernel {
    struct Stretch {
        std::byte* at;
        std::size_t nbytes;
        int expected;  // -1: nothing in particular
        int written;   // -1: nothing
    };
    std::vector<Stretch> stretches;
    std::atomic<int>* wrong;

    static void run(void* data) {
        const auto& kernel = *static_cast<const Kernel*>(data);
        for (const Stretch& stretch : kernel.stretches) {
            const auto holds = [&](std::byte byte) { return byte == static_cast<std::byte>(stretch.expected); };
            if (stretch.expected >= 0 && !std::all_of(stretch.at, stretch.at + stretch.nbytes, holds)) {
                ++*kernel.wrong;
            }
            if (stretch.written >= 0) {
                std::memset(stretch.at, stretch.written, stretch.nbytes);
            }
        }
    }
};

// A program with storages of one to four blocks, which it uses on one or more streams in an order of its own. Where two streams
// use the same storage, the program orders them itself, as every CUDA program has to.
class Program {
public:
    Program(World& world, std::uint64_t seed, int storages) : world_(world), random_(seed) {
        for (int number = 0; number < storages; ++number) {
            const auto count = static_cast<std::int32_t>(1 + random_() % 4);
            const auto nbytes = static_cast<std::int64_t>(64 * (1 + random_() % 16));
            Storage storage;
            storage.first = world.driver->pager().create(std::vector<std::int64_t>(static_cast<std::size_t>(count), nbytes), 0);
            storage.count = count;
            storage.nbytes = static_cast<std::size_t>(count * nbytes);
            for (std::size_t stream = 0; stream < world.streams.size(); ++stream) {
                storage.used.push_back(world.cuda->make_event());
            }
            storages_.push_back(storage);
        }
    }
    ~Program() {
        for (const Storage& storage : storages_) {
            for (const Event event : storage.used) {
                world_.cuda->end_event(event);
            }
        }
    }

    void run(int steps) {
        for (int step = 0; step < steps; ++step) {
            // Mostly in a loop, which is fetched ahead; sometimes anywhere.
            const std::size_t first = random_() % 8 == 0 ? random_() : static_cast<std::size_t>(step);
            std::vector<std::size_t> operands{first % storages_.size()};
            if (random_() % 3 == 0) {
                operands.push_back((operands[0] + 1 + random_() % (storages_.size() - 1)) % storages_.size());
            }
            access(operands, random_() % world_.streams.size());
        }
    }

    int wrong() const { return wrong_; }
    int refused() const { return refused_; }

private:
    struct Storage {
        BlockId first;
        std::int32_t count;
        std::size_t nbytes;
        int content = -1;
        std::vector<Event> used;  // the latest use on each stream
    };

    void access(const std::vector<std::size_t>& operands, std::size_t stream) {
        std::vector<Run> runs;
        std::vector<int> written;
        for (const std::size_t operand : operands) {
            Storage& storage = storages_[operand];
            const bool write = storage.content < 0 || random_() % 3 == 0;
            const Mode mode = !write ? Mode::read : random_() % 2 == 0 ? Mode::overwrite : Mode::write;
            written.push_back(write ? static_cast<int>(random_() % 256) : -1);
            runs.push_back({storage.first, storage.count, mode, -1});
        }
        Pause pause;
        auto lock = world_.driver->lock(pause);
        const auto access = world_.driver->request(runs, world_.handle(stream));
        if (!access->granted) {
            const Wait outcome = world_.driver->await(lock, *access, farpool::monotonic_seconds() + patience, pause);
            if (outcome == Wait::refused) {
                ++refused_;
                return;
            }
            CHECK(outcome == Wait::granted);
        }
        lock.unlock();
        launch(operands, runs, written, access->places, stream);
        lock.lock();
        world_.driver->release(*access);
    }

    void launch(const std::vector<std::size_t>& operands, const std::vector<Run>& runs, const std::vector<int>& written,
                const std::vector<std::int64_t>& places, std::size_t stream) {
        kernels_.push_back({{}, &wrong_});
        for (std::size_t index = 0; index < operands.size(); ++index) {
            Storage& storage = storages_[operands[index]];
            for (const Event used : storage.used) {
                world_.cuda->wait(world_.streams[stream], used);
            }
            const bool keeps = runs[index].mode != Mode::overwrite;
            kernels_.back().stretches.push_back(
                {world_.at(places[index]), storage.nbytes, keeps ? storage.content : -1, written[index]});
            storage.content = written[index] < 0 ? storage.content : written[index];
        }
        CHECK_EQUAL(fake_cuda().launch(world_.streams[stream], Kernel::run, &kernels_.back(), 1e-6), 0);
        for (const std::size_t operand : operands) {
            world_.cuda->record(storages_[operand].used[stream], world_.streams[stream]);
        }
    }

    World& world_;
    std::mt19937_64 random_;
    std::vector<Storage> storages_;
    std::deque<Kernel> kernels_;
    std::atomic<int> wrong_ = 0;
    int refused_ = 0;
};

// One random program: what varies follows from the seed.
void run_program(std::uint64_t seed) {
    Setup setup;
    setup.seed = seed;
    setup.policy = static_cast<Policy>(seed % 4);
    setup.streams = 1 + seed / 4 % 3;
    setup.page_locked = seed / 12 % 3 == 0 ? 0 : 24 << 10;
    setup.one_in = seed / 36 % 4 == 0 ? 17 : 0;
    setup.capacity = (12 + seed % 5) << 10;
    std::mt19937_64 sizes(seed);
    setup.chunk = 256 << sizes() % 4;
    setup.staging = setup.chunk * (1 + sizes() % 8);
    setup.bounce = 64 << sizes() % 5;
    setup.version = seed % 5 == 0 ? 12080 : 12040;  // with batches of copies, and without
    World world(setup);
    int wrong = 0;
    {
        Program program(world, seed, 24);
        program.run(60);
        world.close();
        wrong = program.wrong();
        CHECK(setup.one_in != 0 || program.refused() == 0);
    }
    if (wrong > 0) {
        farpool::testing::fail("seed " + std::to_string(seed) + ": " + std::to_string(wrong) + " kernels saw wrong bytes",
                               __FILE__, __LINE__);
    }
}

std::uint64_t programs() {
    const char* const wanted = std::getenv("FARPOOL_DEVICE_PROGRAMS");
    return wanted == nullptr ? 300 : std::strtoull(wanted, nullptr, 10);
}

}  // namespace

TEST("random programs on all schedules see their own bytes") {
    for (std::uint64_t seed = 0; seed < programs(); ++seed) {
        run_program(seed);
    }
}

int main() { return farpool::testing::run(); }
