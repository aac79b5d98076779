// Fuzzes a node: `protocol FOLDER SECONDS SEED [TRIAL]`. With a trial only that one is run.
#include <chrono>
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
        std::fprintf(stderr, "usage: protocol FOLDER SECONDS SEED [TRIAL]\n");
        return 2;
    }
    const std::string folder = argv[1];
    const double limit = std::strtod(argv[2], nullptr);
    const std::uint64_t seed = std::strtoull(argv[3], nullptr, 10);
    std::uint64_t trial = argc > 4 ? std::strtoull(argv[4], nullptr, 10) : 0;
    const auto begun = std::chrono::steady_clock::now();
    const std::size_t files = open_files();
    do {
        // Said before: where a sanitizer ends the process nothing is said after.
        std::fprintf(stderr, "\rseed %llu trial %llu ", static_cast<unsigned long long>(seed), static_cast<unsigned long long>(trial));
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
    } while (argc <= 4 && std::chrono::steady_clock::now() - begun < std::chrono::duration<double>(limit));
    std::printf("protocol: %llu trials of seed %llu without a finding\n", static_cast<unsigned long long>(trial),
                static_cast<unsigned long long>(seed));
    return 0;
}
