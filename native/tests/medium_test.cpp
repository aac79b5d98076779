// A catalogue on a medium that the project does not have: memory that the node addresses and readers do not, as behind CXL.
#include "node/catalogue/medium.hpp"

#include <cstring>
#include <string>

#include "core/crc32c.hpp"
#include "core/free_space.hpp"
#include "node/catalogue/catalogue.hpp"
#include "tests/folder.hpp"
#include "tests/testing.hpp"

using farpool::Budget;
using farpool::Catalogue;
using farpool::Found;
using farpool::Medium;
using farpool::Status;
using farpool::testing::Folder;

namespace {

constexpr std::uint64_t mib = std::uint64_t{1} << 20;

// The memory of a device, which keeps its content when the node restarts.
struct Device {
    explicit Device(std::uint64_t nbytes) : bytes(nbytes) {}
    std::vector<std::byte> bytes;
    std::uint64_t id = 7;
};

class DeviceMedium final : public Medium {
public:
    static constexpr std::uint64_t unit_bytes = 256;

    explicit DeviceMedium(Device& device)
        : device_(device), space_(static_cast<std::int64_t>(device.bytes.size() / unit_bytes)) {}

    std::uint64_t id() const noexcept override { return device_.id; }
    std::uint64_t capacity() const noexcept override { return device_.bytes.size(); }
    std::uint64_t used() const noexcept override {
        return capacity() - static_cast<std::uint64_t>(space_.free_units()) * unit_bytes;
    }
    std::uint64_t unit() const noexcept override { return unit_bytes; }
    std::optional<std::uint64_t> alloc(std::uint32_t units) override {
        const std::int64_t first = space_.alloc(units);
        return first < 0 ? std::nullopt : std::optional(static_cast<std::uint64_t>(first));
    }
    bool adopt(std::uint64_t first, std::uint32_t units) override {
        return space_.take(static_cast<std::int64_t>(first), units);
    }
    void release(std::uint64_t first, std::uint32_t units) override { space_.free(static_cast<std::int64_t>(first), units); }
    const std::byte* view(std::uint64_t first) const noexcept override { return device_.bytes.data() + first * unit_bytes; }
    void put(std::uint64_t first, const Source& source, Then then) override {
        ++puts;
        if (!fails) {
            std::memcpy(device_.bytes.data() + first * unit_bytes, source.data, source.nbytes);
        }
        then(!fails);
    }

    int puts = 0;
    bool fails = false;

private:
    Device& device_;
    farpool::FreeSpace space_;
};

std::string payload_of(int number, std::size_t nbytes) {
    std::string payload(nbytes, '\0');
    for (std::size_t at = 0; at < nbytes; ++at) {
        payload[at] = static_cast<char>(static_cast<std::size_t>(number) * 131 + at * 7 + at / 251);
    }
    return payload;
}

Status put(Catalogue& objects, int number, std::size_t nbytes = 100'000) {
    const std::string payload = payload_of(number, nbytes);
    const Found place = objects.prepare(std::to_string(number), nbytes, {});
    if (place.status != Status::done) {
        return place.status;
    }
    std::memcpy(objects.at(place.payload), payload.data(), nbytes);
    return objects.commit(place.offset, place.serial, farpool::crc32c(payload.data(), nbytes)).status;
}

// Finds an object, and checks its bytes where the node would send them from.
Found checked(Catalogue& objects, int number, std::size_t nbytes = 100'000) {
    const Found found = objects.find(std::to_string(number), false);
    if (found.status == Status::done) {
        CHECK_EQUAL(found.nbytes, nbytes);
        CHECK(found.view != nullptr && std::memcmp(found.view, payload_of(number, nbytes).data(), nbytes) == 0);
    }
    return found;
}

}  // namespace

TEST("objects move to a medium and back with their priority, and none of a higher priority leaves the medium for others") {
    const Folder folder;
    Budget budget{4 * mib};
    Device device(mib);  // for ten objects
    DeviceMedium medium(device);
    std::string note;
    Catalogue objects(folder.path(), 0, budget, &medium, true, note);
    for (int number = 0; number < 10; ++number) {
        CHECK(put(objects, number) == Status::done);
        CHECK(objects.retain(std::to_string(number), {4, 9}) == Status::done);
        CHECK(objects.demote(objects.find(std::to_string(number), false)) == Status::done);
    }
    for (int number = 10; number < 100; ++number) {
        CHECK(put(objects, number) == Status::done);
    }
    for (int number = 0; number < 10; ++number) {
        CHECK(!checked(objects, number).is_mapped_by_readers);
    }
    CHECK_EQUAL(objects.counts().demotions, 10u);  // ordinary objects were evicted and not moved
    CHECK_EQUAL(objects.counts().retained, 10u);
    CHECK(objects.copy_to_ram(objects.find("3", false)).is_mapped_by_readers);
    CHECK_EQUAL(objects.counts().retained, 10u);
    CHECK_EQUAL(objects.find("3", false).head.flags, 4u << farpool::priority_shift | farpool::priority_ends);
    CHECK_EQUAL(objects.end_session(9), 10u);
    CHECK_EQUAL(objects.counts().retained, 0u);
    for (int number = 100; number < 200; ++number) {
        CHECK(put(objects, number) == Status::done);
    }
    CHECK(objects.counts().demotions > 10u);
    int left = 0;
    for (int number = 0; number < 10; ++number) {
        left += checked(objects, number).status == Status::done ? 1 : 0;
    }
    CHECK(left < 10);
}

TEST("an object whose session has ended moves without the priority that no sweep has taken yet") {
    const Folder folder;
    Budget budget{16 * mib};
    Device device(mib);
    DeviceMedium medium(device);
    std::string note;
    Catalogue objects(folder.path(), 0, budget, &medium, true, note);
    for (int number = 0; number <= 5000; ++number) {
        CHECK(put(objects, number, 100) == Status::done);
        CHECK(objects.retain(std::to_string(number), {4, 9}) == Status::done);
    }
    CHECK_EQUAL(objects.end_session(9), 5001u);
    CHECK(objects.counts().retained > 0u);
    CHECK(objects.demote(objects.find("5000", false)) == Status::done);
    CHECK(!checked(objects, 5000, 100).is_mapped_by_readers);
    objects.sweep(10'000);
    CHECK_EQUAL(objects.counts().retained, 0u);
}

TEST("payloads move to a new kind of medium when memory is needed, and the oldest are evicted when it is full, too") {
    const Folder folder;
    Budget budget{4 * mib};
    Device device(6 * mib);
    DeviceMedium medium(device);
    std::string note;
    Catalogue objects(folder.path(), 0, budget, &medium, true, note);
    for (int number = 0; number < 80; ++number) {
        CHECK(put(objects, number) == Status::done);
        CHECK(budget.used() <= budget.limit());
    }
    CHECK_EQUAL(objects.counts().evictions, 0u);
    CHECK_EQUAL(medium.puts, static_cast<int>(objects.counts().demotions));
    CHECK_EQUAL(budget.moving(), 0u);
    std::uint64_t moved = 0;
    for (int number = 0; number < 80; ++number) {
        const Found found = checked(objects, number);
        CHECK(found.status == Status::done);
        moved += found.is_mapped_by_readers ? 0 : 1;
    }
    CHECK_EQUAL(moved, objects.counts().shelved);
    CHECK_EQUAL(medium.used(), moved * medium.units(100'000) * medium.unit());
    for (int number = 80; number < 200; ++number) {
        CHECK(put(objects, number) == Status::done);
    }
    CHECK(objects.counts().from_file > 0 && objects.counts().evictions == objects.counts().from_file);
    int left = 0;
    for (int number = 0; number < 200; ++number) {
        left += checked(objects, number).status == Status::done ? 1 : 0;
    }
    CHECK(left > 90 && left < 110);  // 10 MiB
    for (int number = 0; number < 200; ++number) {
        static_cast<void>(objects.remove(std::to_string(number)));
    }
    CHECK_EQUAL(medium.used(), 0u);
    CHECK_EQUAL(objects.used(), objects.tables());
}

TEST("an object on a new kind of medium stays readable there while it is held, and is copied to memory to be pinned") {
    const Folder folder;
    Budget budget{4 * mib};
    Device device(6 * mib);
    DeviceMedium medium(device);
    std::string note;
    Catalogue objects(folder.path(), 0, budget, &medium, true, note);
    CHECK(put(objects, 1) == Status::done);
    CHECK(objects.demote(objects.find("1", false)) == Status::done);
    const Found moved = checked(objects, 1);
    CHECK(!moved.is_mapped_by_readers);
    objects.retain(moved);
    CHECK(objects.remove("1") == Status::done);
    CHECK(medium.used() > 0);  // a reply may still be sent from there
    objects.release(moved.offset);
    CHECK_EQUAL(medium.used(), 0u);

    CHECK(put(objects, 2) == Status::done);
    CHECK(objects.demote(objects.find("2", false)) == Status::done);
    const Found pinned = objects.copy_to_ram(objects.find("2", true));
    CHECK(pinned.is_mapped_by_readers);
    CHECK_EQUAL(checked(objects, 2).offset, pinned.offset);
    CHECK_EQUAL(objects.counts().promotions, 1u);
    CHECK_EQUAL(medium.used(), 0u);
    objects.pin(pinned);
    CHECK(objects.demote(objects.find("2", false)) == Status::busy);
    for (int number = 3; number < 100; ++number) {
        CHECK(put(objects, number) == Status::done);
    }
    CHECK(checked(objects, 2).is_mapped_by_readers);
    objects.unpin(pinned.offset);
    CHECK(objects.demote(objects.find("2", false)) == Status::done);
    CHECK(!checked(objects, 2).is_mapped_by_readers);
}

TEST("a restart adopts payloads on a new kind of medium, unless the medium has another content") {
    const Folder folder;
    Device device(6 * mib);
    std::uint64_t used = 0;
    for (int start = 0; start < 3; ++start) {
        Budget budget{4 * mib};
        DeviceMedium medium(device);
        std::string note;
        Catalogue objects(folder.path(), 0, budget, &medium, false, note);
        CHECK_EQUAL(note, "");
        if (start == 0) {
            for (int number = 0; number < 60; ++number) {
                CHECK(put(objects, number) == Status::done);
            }
            used = medium.used();
            CHECK(used > 0);
        } else if (start == 1) {
            CHECK_EQUAL(objects.counts().adopted, 60u);
            CHECK_EQUAL(medium.used(), used);
            for (int number = 0; number < 60; ++number) {
                CHECK(checked(objects, number).status == Status::done);
            }
            ++device.id;
        } else {
            CHECK_EQUAL(medium.used(), 0u);
            const std::uint64_t lost = used / (medium.units(100'000) * medium.unit());
            CHECK_EQUAL(objects.counts().adopted, 60 - lost);
            CHECK_EQUAL(objects.counts().shelved, 0u);
        }
    }
}

TEST("an object is evicted if a new kind of medium cannot store it") {
    const Folder folder;
    Budget budget{4 * mib};
    Device device(6 * mib);
    DeviceMedium medium(device);
    std::string note;
    Catalogue objects(folder.path(), 0, budget, &medium, true, note);
    CHECK(put(objects, 1) == Status::done);
    medium.fails = true;
    static_cast<void>(objects.demote(objects.find("1", false)));
    CHECK(objects.find("1", false).status == Status::missing);
    CHECK_EQUAL(objects.counts().from_file, 1u);
    CHECK_EQUAL(medium.used(), 0u);
    CHECK_EQUAL(objects.used(), objects.tables());
    CHECK_EQUAL(budget.moving(), 0u);
}

int main() { return farpool::testing::run(); }
