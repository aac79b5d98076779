// Speed of regions four times their budget, next to a bare loop that answers page faults and does nothing else, and next to the
// lower tier alone, in one run. `farpool bench region` runs it. Prints one JSON object with the samples of each round.
//
// region_speed ROUNDS MIB [FILE]: regions of so many MiB; with a file, this file is the lower tier, past the page cache.
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.hpp"
#include "core/file_port.hpp"
#include "core/memory_port.hpp"
#include "core/relax.hpp"
#include "region/region.hpp"

using namespace farpool;
using farpool::region::Page;
using farpool::region::page_nbytes;
using farpool::region::Region;

namespace {

constexpr std::size_t mib = std::size_t{1} << 20;
constexpr Page run_pages = 2 * mib / page_nbytes;
constexpr Page faults_timed = 10000;

double median(std::vector<double> values) {
    std::ranges::nth_element(values, values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2));
    return values[values.size() / 2];
}

// Reads one byte of pages in random order; the median of the seconds for each.
double time_random(const volatile unsigned char* bytes, Page pages, unsigned seed) {
    std::mt19937 dice(seed);
    std::vector<Page> order(pages);
    for (Page page = 0; page < pages; ++page) {
        order[page] = page;
    }
    std::ranges::shuffle(order, dice);
    std::vector<double> times;
    for (Page index = 0; index < std::min(faults_timed, pages); ++index) {
        const double start = monotonic_seconds();
        (void)bytes[std::size_t{order[index]} * page_nbytes];
        times.push_back(monotonic_seconds() - start);
    }
    return median(std::move(times));
}

// A thread that answers each fault with a copy of a run of pages from `source` and evicts the run that came longest ago; it
// spins as a region's thread does. If it `saves`, it brings zeros instead, and copies runs to `source` before they leave.
class BareLoop {
public:
    BareLoop(std::byte* source, Page pages, Page budget, Page run = 1, bool saves = false)
        : source_(source), pages_(pages), budget_(budget / run), run_(run * page_nbytes), saves_(saves), zeros_(run) {
        memory_ = memfd_create("bare", MFD_CLOEXEC);
        if (memory_ < 0 || ftruncate(memory_, static_cast<off_t>(pages * page_nbytes)) != 0) {
            std::abort();
        }
        bytes = static_cast<unsigned char*>(mmap(nullptr, pages * page_nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory_, 0));
        faults_ = static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK));
        uffdio_api api{};
        api.api = UFFD_API;
        api.features = UFFD_FEATURE_MISSING_SHMEM;
        uffdio_register all{};
        all.range = {reinterpret_cast<std::uintptr_t>(bytes), pages * page_nbytes};
        all.mode = UFFDIO_REGISTER_MODE_MISSING;
        if (faults_ < 0 || ioctl(faults_, UFFDIO_API, &api) != 0 || ioctl(faults_, UFFDIO_REGISTER, &all) != 0) {
            std::abort();
        }
        thread_ = std::thread([this] { answer(); });
    }
    ~BareLoop() {
        ending_ = true;
        thread_.join();
        munmap(bytes, pages_ * page_nbytes);
        close(faults_);
        close(memory_);
    }
    unsigned char* bytes;

private:
    void answer() {
        std::vector<std::uint64_t> came;
        std::size_t oldest = 0;
        double spin_until = 0;
        for (unsigned attempt = 1; !ending_;) {
            uffd_msg message;
            if (read(faults_, &message, sizeof message) != sizeof message) {
                if (monotonic_seconds() < spin_until) {
                    relax(attempt++);
                } else {
                    pollfd watched{faults_, POLLIN, 0};
                    poll(&watched, 1, 10);
                }
                continue;
            }
            const std::uint64_t address = message.arg.pagefault.address;
            const std::uint64_t offset = (address - reinterpret_cast<std::uintptr_t>(bytes)) / run_ * run_;
            if (came.size() - oldest >= budget_) {
                const auto leaving = static_cast<off_t>(came[oldest++]);
                if (saves_ && pread(memory_, source_ + leaving, run_, leaving) != static_cast<ssize_t>(run_)) {
                    std::abort();
                }
                fallocate(memory_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, leaving, static_cast<off_t>(run_));
            }
            uffdio_copy copy{};
            copy.dst = reinterpret_cast<std::uintptr_t>(bytes) + offset;
            copy.src = reinterpret_cast<std::uintptr_t>(saves_ ? zeros_.data() : source_ + offset);
            copy.len = run_;
            ioctl(faults_, UFFDIO_COPY, &copy);
            came.push_back(offset);
            spin_until = monotonic_seconds() + 50e-6;
        }
    }

    std::byte* const source_;
    const std::size_t pages_;
    const std::size_t budget_;  // in runs
    const std::size_t run_;     // in bytes
    const bool saves_;
    const region::Zeros zeros_;
    int memory_;
    int faults_;
    std::atomic<bool> ending_ = false;
    std::thread thread_;
};

// Writes memory from the beginning to the end; the bytes per second.
double time_write(void* bytes, std::size_t nbytes) {
    const double start = monotonic_seconds();
    std::memset(bytes, 3, nbytes);
    return static_cast<double>(nbytes) / (monotonic_seconds() - start);
}

// Reads the bytes that time_write wrote.
double time_read(const void* bytes, std::size_t nbytes) {
    const auto* words = static_cast<const std::uint64_t*>(bytes);
    std::uint64_t sum = 0;
    const double start = monotonic_seconds();
    for (std::size_t index = 0; index < nbytes / sizeof(std::uint64_t); ++index) {
        sum += words[index];
    }
    const double seconds = monotonic_seconds() - start;
    if (sum != 0x0303030303030303u * (nbytes / sizeof(std::uint64_t))) {
        std::fprintf(stderr, "the sweep read other bytes than it wrote\n");
        std::exit(1);
    }
    return static_cast<double>(nbytes) / seconds;
}

// Samples by name, one of each round.
using Samples = std::map<std::string, std::vector<double>>;

class Contenders {
public:
    Contenders(Page pages, Memory& memory, Port& port) : pages_(pages), memory_(memory), port_(port) {}

    // Seconds of a random fault.
    void random(Samples& samples, unsigned seed) {
        Region region({.name = "random", .most = pages_, .budget = pages_ / 4});
        region.grow(pages_, {{&port_, 0, pages_, "tier", false}});
        std::memset(region.data(), 3, nbytes());  // so that every page is stored below
        region.sync(0, pages_);
        region.dont_need(0, pages_);
        samples["random"].push_back(time_random(reinterpret_cast<unsigned char*>(region.data()), pages_, seed));
        region.close();
    }
    void bare_random(Samples& samples, unsigned seed) {
        const BareLoop bare(memory_.data(), pages_, pages_ / 4);
        samples["bare_random"].push_back(time_random(bare.bytes, pages_, seed));
    }
    // Bytes per second of sweeps.
    void sweep(Samples& samples, unsigned) {
        Region region({.name = "sweep", .most = pages_, .budget = pages_ / 4});
        region.grow(pages_, {{&port_, 0, pages_, "tier", false}});
        samples["write"].push_back(time_write(region.data(), nbytes()));
        region.sync(0, pages_);
        samples["read"].push_back(time_read(region.data(), nbytes()));
        region.close();
    }
    // The bare loop moves runs of 2 MiB.
    void bare_sweep(Samples& samples, unsigned) {
        {
            const BareLoop bare(memory_.data(), pages_, pages_ / 4, run_pages, true);
            samples["bare_write"].push_back(time_write(bare.bytes, nbytes()));
        }
        std::memset(memory_.data(), 3, nbytes());
        const BareLoop bare(memory_.data(), pages_, pages_ / 4, run_pages);
        samples["bare_read"].push_back(time_read(bare.bytes, nbytes()));
    }
    // The tier alone moves pieces of 2 MiB, one at a time.
    void alone(Samples& samples, unsigned) {
        const auto staging = region::Staging(2 * mib);
        std::memset(staging.data(), 3, 2 * mib);
        double start = monotonic_seconds();
        for (std::size_t at = 0; at < nbytes(); at += 2 * mib) {
            port_.write(at, staging.data(), 2 * mib);
        }
        samples["alone_write"].push_back(static_cast<double>(nbytes()) / (monotonic_seconds() - start));
        start = monotonic_seconds();
        for (std::size_t at = 0; at < nbytes(); at += 2 * mib) {
            port_.read(at, staging.data(), 2 * mib);
        }
        samples["alone_read"].push_back(static_cast<double>(nbytes()) / (monotonic_seconds() - start));
    }

private:
    std::size_t nbytes() const { return pages_ * page_nbytes; }

    const Page pages_;
    Memory& memory_;
    Port& port_;
};

void print(const Samples& samples) {
    const char* before = "{";
    for (const auto& [name, values] : samples) {
        std::printf("%s\"%s\": [", before, name.c_str());
        for (std::size_t index = 0; index < values.size(); ++index) {
            std::printf("%s%.9g", index == 0 ? "" : ", ", values[index]);
        }
        std::printf("]");
        before = ", ";
    }
    std::printf("}\n");
}

}  // namespace

int main(int argc, char** argv) {
    const unsigned rounds = argc < 3 ? 0 : static_cast<unsigned>(std::atoi(argv[1]));
    const auto pages = argc < 3 ? 0 : static_cast<Page>(std::atoi(argv[2]) * mib / page_nbytes);
    if (rounds == 0 || pages % (4 * run_pages) != 0 || pages == 0) {
        std::fprintf(stderr, "usage: region_speed ROUNDS MIB [FILE]; MIB is a multiple of 8\n");
        return 2;
    }
    Memory memory(pages * page_nbytes);
    memory.touch(0, memory.nbytes());
    MemoryPort port(memory);
    std::unique_ptr<FilePort> file;
    if (argc > 3) {
        const int fd = open(argv[3], O_RDWR | O_CREAT | O_DIRECT, 0600);
        if (fd < 0 || posix_fallocate(fd, 0, static_cast<off_t>(pages * page_nbytes)) != 0) {
            std::perror(argv[3]);
            return 1;
        }
        file = std::make_unique<FilePort>(fd, "file", FilePort::Options{true, 4096, 0, true, false});
    }
    Contenders contenders(pages, memory, file ? static_cast<Port&>(*file) : port);
    // The first sweep of a file costs the file system more than the others.
    Samples first;
    contenders.alone(first, 0);
    std::vector<void (Contenders::*)(Samples&, unsigned)> works{&Contenders::sweep, &Contenders::alone};
    if (!file) {
        works.insert(works.end(), {&Contenders::bare_sweep, &Contenders::random, &Contenders::bare_random});
    }
    Samples samples;
    for (unsigned round = 0; round < rounds; ++round) {
        for (const auto work : works) {
            (contenders.*work)(samples, round);
        }
        std::ranges::rotate(works, works.begin() + 1);
    }
    print(samples);
    return 0;
}
