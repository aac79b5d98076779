// Speed of regions, next to a bare loop that answers page faults and does nothing else, in one run. Prints one JSON object.
//
// region_speed [FILE]: with a file, the sweep's lower tier is this file, read and written past the page cache.
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
#include <memory>
#include <random>
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
constexpr Page far_pages = 256 * mib / page_nbytes;
constexpr Page near_pages = far_pages / 4;
constexpr int faults_timed = 10000;

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
    for (int index = 0; index < faults_timed; ++index) {
        const double start = monotonic_seconds();
        (void)bytes[std::size_t{order[static_cast<std::size_t>(index)]} * page_nbytes];
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

struct Sweep {
    double write;
    double read;
    double bare_write;
    double bare_read;
    double port_write;
    double port_read;
};

// Writes memory from the beginning to the end; the bytes per second.
double time_write(void* bytes) {
    const double start = monotonic_seconds();
    std::memset(bytes, 3, far_pages * page_nbytes);
    return static_cast<double>(far_pages) * page_nbytes / (monotonic_seconds() - start);
}

// Reads the bytes that time_write wrote.
double time_read(const void* bytes) {
    const auto* words = static_cast<const std::uint64_t*>(bytes);
    std::uint64_t sum = 0;
    const double start = monotonic_seconds();
    for (std::size_t index = 0; index < far_pages * page_nbytes / sizeof(std::uint64_t); ++index) {
        sum += words[index];
    }
    const double seconds = monotonic_seconds() - start;
    if (sum != 0x0303030303030303u * (far_pages * page_nbytes / sizeof(std::uint64_t))) {
        std::fprintf(stderr, "the sweep read other bytes than it wrote\n");
        std::exit(1);
    }
    return static_cast<double>(far_pages) * page_nbytes / seconds;
}

// Bytes per second of sweeps of a region four times its budget, of bare loops that move runs of 2 MiB from and to `memory`, and
// of the tier alone in pieces of 2 MiB.
Sweep sweep(Port& port, Memory& memory) {
    Sweep result{};
    const auto staging = region::Staging(2 * mib);
    std::memset(staging.data(), 1, 2 * mib);
    const double total = static_cast<double>(far_pages) * page_nbytes;
    double start = monotonic_seconds();
    for (std::size_t at = 0; at < far_pages * page_nbytes; at += 2 * mib) {
        port.write(at, staging.data(), 2 * mib);
    }
    result.port_write = total / (monotonic_seconds() - start);
    start = monotonic_seconds();
    for (std::size_t at = 0; at < far_pages * page_nbytes; at += 2 * mib) {
        port.read(at, staging.data(), 2 * mib);
    }
    result.port_read = total / (monotonic_seconds() - start);
    Region region({.name = "sweep", .most = far_pages, .budget = near_pages});
    region.grow(far_pages, {{&port, 0, far_pages, "tier", false}});
    result.write = time_write(region.data());
    region.sync(0, far_pages);
    result.read = time_read(region.data());
    region.close();
    constexpr Page run = 2 * mib / page_nbytes;
    {
        const BareLoop bare(memory.data(), far_pages, near_pages, run, true);
        result.bare_write = time_write(bare.bytes);
    }
    std::memset(memory.data(), 3, far_pages * page_nbytes);
    {
        const BareLoop bare(memory.data(), far_pages, near_pages, run);
        result.bare_read = time_read(bare.bytes);
    }
    return result;
}

}  // namespace

int main(int argc, char** argv) {
    Memory memory(far_pages * page_nbytes);
    memory.touch(0, memory.nbytes());
    MemoryPort port(memory);
    std::vector<double> ratios;
    std::vector<double> regions;
    std::vector<double> bares;
    for (unsigned round = 0; round < 5; ++round) {
        {
            const BareLoop bare(memory.data(), far_pages, near_pages);
            bares.push_back(time_random(bare.bytes, far_pages, round));
        }
        Region region({.name = "random", .most = far_pages, .budget = near_pages});
        region.grow(far_pages, {{&port, 0, far_pages, "memory", false}});
        std::memset(region.data(), 1, far_pages * page_nbytes);  // so that every page is stored below
        region.sync(0, far_pages);
        region.dont_need(0, far_pages);
        regions.push_back(time_random(reinterpret_cast<unsigned char*>(region.data()), far_pages, round));
        region.close();
        ratios.push_back(regions.back() / bares.back());
    }
    std::unique_ptr<FilePort> file;
    Port* far = &port;
    if (argc > 1) {
        const int fd = open(argv[1], O_RDWR | O_CREAT | O_DIRECT, 0600);
        if (fd < 0 || posix_fallocate(fd, 0, static_cast<off_t>(far_pages * page_nbytes)) != 0) {
            std::perror(argv[1]);
            return 1;
        }
        file = std::make_unique<FilePort>(fd, "file", FilePort::Options{true, 4096, 0, true, false});
        far = file.get();
    }
    const Sweep swept = sweep(*far, memory);
    std::printf(
        "{\"random_fault_us\": %.2f, \"bare_fault_us\": %.2f, \"random_ratio\": %.3f, \"sweep_write_gbps\": %.3f, "
        "\"sweep_read_gbps\": %.3f, \"bare_write_gbps\": %.3f, \"bare_read_gbps\": %.3f, \"tier_write_gbps\": %.3f, "
        "\"tier_read_gbps\": %.3f}\n",
        median(regions) * 1e6, median(bares) * 1e6, median(ratios), swept.write / 1e9, swept.read / 1e9, swept.bare_write / 1e9,
        swept.bare_read / 1e9, swept.port_write / 1e9, swept.port_read / 1e9);
    return 0;
}
