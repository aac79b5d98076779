#include "bindings/stretches.hpp"

#include <map>

nb::list stretches(const Torch& torch, const nb::list& lists, std::size_t count, std::int64_t share, std::int64_t pinned) {
    nb::list cut;
    std::map<farpool::pager::BlockId, std::int64_t> blocks;  // of the stretch: bytes, by the first of each storage
    std::size_t start = 0;
    std::int64_t total = 0;
    std::int64_t room = 0;
    for (std::size_t index = 0; index < count; ++index) {
        std::map<farpool::pager::BlockId, std::int64_t> touched;
        std::int64_t nbytes = 0;
        std::int64_t fast = 0;
        for (const nb::handle list : lists) {
            const nb::object tensor = list[index];
            const nb::object footprint = torch.is_paged(tensor.ptr()) ? torch.footprint_of(tensor.ptr()) : nb::object();
            if (footprint.is_valid()) {
                const Footprint& it = *nb::inst_ptr<Footprint>(footprint);
                nbytes += it.stop - it.start;
                touched.emplace(it.layout->first, it.layout->count * it.layout->block_bytes);
                fast = nb::cast<std::int64_t>(it.pool.attr("fast"));
            }
        }
        if (touched.empty()) {
            continue;
        }
        const auto more = [&] {
            std::int64_t sum = 0;
            for (const auto& [first, bytes] : touched) {
                sum += blocks.contains(first) ? 0 : bytes;
            }
            return sum;
        };
        if (index > start && (total + nbytes > fast / share || room + more() > fast / pinned)) {
            cut.append(nb::slice(nb::int_(start), nb::int_(index), nb::none()));
            start = index;
            total = room = 0;
            blocks.clear();
        }
        total += nbytes;
        room += more();
        blocks.merge(touched);
    }
    cut.append(nb::slice(nb::int_(start), nb::int_(count), nb::none()));
    return cut;
}
