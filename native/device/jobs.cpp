#include "device/jobs.hpp"

#include <tuple>

namespace farpool::device {

namespace {

std::vector<Part> lay_out(Job& job, PageLocks* locks) {
    std::vector<Part> parts;
    std::vector<HostPart> memory;
    for (const Piece& piece : job.pieces) {
        memory.clear();
        job.staged = job.staged || locks == nullptr || !locks->parts(job.port, piece.offset, piece.nbytes, memory);
        if (job.staged) {
            memory.assign(1, {0, piece.nbytes});
        }
        std::size_t done = 0;
        for (const HostPart& part : memory) {
            parts.push_back({piece.offset + done, piece.address + done, part.address, part.nbytes});
            done += part.nbytes;
        }
    }
    return parts;
}

}  // namespace

bool Rank::operator()(const Job* left, const Job* right) const {
    const auto key = [](const Job* job) { return std::tuple(-job->priority, !job->fetch(), job->number); };
    return key(left) < key(right);
}

void cut(Job& job, PageLocks* locks, std::size_t most) {
    for (Part& part : lay_out(job, locks)) {
        while (part.nbytes > 0) {
            const std::size_t size = std::min(part.nbytes, most);
            if (job.chunks.empty() || job.chunks.back().nbytes + rounded(size) > most) {
                job.chunks.push_back({&job, {}});
            }
            Chunk& chunk = job.chunks.back();
            chunk.parts.push_back({part.offset, part.place, part.host, size});
            chunk.nbytes += rounded(size);
            part = {part.offset + size, part.place + size, part.host + size, part.nbytes - size};
        }
    }
}

}  // namespace farpool::device
