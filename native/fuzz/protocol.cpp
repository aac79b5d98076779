// Fuzzes a node: `protocol FOLDER TRIALS SEED [TRIAL]`. With a trial only that one is run.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>

#include "fuzz/world.hpp"

namespace {

std::size_t open_files() {
    std::size_t count = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        ++count;
    }
    return count;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 4) {
        std::fprintf(stderr, "usage: protocol FOLDER TRIALS SEED [TRIAL]\n");
        return 2;
    }
    const std::string folder = argv[1];
    const std::uint64_t trials = std::strtoull(argv[2], nullptr, 10);
    const std::uint64_t seed = std::strtoull(argv[3], nullptr, 10);
    std::uint64_t trial = argc > 4 ? std::strtoull(argv[4], nullptr, 10) : 0;
    const std::size_t files = open_files();
    do {
        // Said before: where a sanitizer ends the process nothing is said after.
        std::fprintf(stderr, "\rseed %llu trial %llu ", static_cast<unsigned long long>(seed),
                     static_cast<unsigned long long>(trial));
        try {
            farpool::fuzz::World(folder, farpool::mix64(seed) ^ farpool::mix64(~trial)).run();
        } catch (const std::exception& error) {
            std::fprintf(stderr, "\nfailed: %s\n", error.what());
            return 1;
        }
        if (open_files() != files) {
            std::fprintf(stderr, "\nfailed: descriptors are left open\n");
            return 1;
        }
        ++trial;
    } while (argc <= 4 && trial < trials);
    std::printf("protocol: %llu trials of seed %llu without a finding\n", static_cast<unsigned long long>(trial),
                static_cast<unsigned long long>(seed));
    return 0;
}
