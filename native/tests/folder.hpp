// A new folder for the files of a test, removed at its end.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

#include "tests/testing.hpp"

namespace farpool::testing {

class Folder {
public:
    Folder() {
        std::string name = (std::filesystem::temp_directory_path() / "farpool-test-XXXXXX").string();
        CHECK(mkdtemp(name.data()) != nullptr);
        path_ = name;
    }
    ~Folder() { std::filesystem::remove_all(path_); }
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;
    std::string path() const { return path_.string(); }

private:
    std::filesystem::path path_;
};

}  // namespace farpool::testing
