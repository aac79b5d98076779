#include "node/fetches.hpp"

namespace farpool {

std::shared_ptr<AlignedBuffer> Fetches::start(std::uint32_t tenant, Catalogue& objects, const Fetch& fetch) {
    const Place place{tenant, fetch.offset};
    auto reading = readings_.find(place);
    if (reading == readings_.end()) {
        auto into = std::make_shared<AlignedBuffer>(fetch.nbytes);
        reading = readings_.emplace(place, Reading{into, {}}).first;
        objects.retain_again(fetch.offset);  // until it is read, also if the connection is closed
        objects.read(fetch.block, into, [this, place, &objects](bool ok) { finish(place, objects, ok); });
    }
    reading->second.waiting.push_back(fetch);
    return reading->second.into;
}

void Fetches::finish(const Place& place, Catalogue& objects, bool ok) {
    const Reading reading = std::move(readings_.extract(place).mapped());
    if (!ok) {
        objects.lose(place.second);
    }
    objects.release(place.second);
    for (const Fetch& fetch : reading.waiting) {
        deliver_(fetch, ok);
    }
    if (!ok) {
        events_.note("lost", 0, "an object could not be read from the file " + path_);
    }
}

}  // namespace farpool
