// The check that ends a trial as a failure.
#pragma once

#include <stdexcept>
#include <string>

namespace farpool::fuzz {

inline void require(bool is_true, const std::string& what) {
    if (!is_true) {
        throw std::logic_error(what);
    }
}

}  // namespace farpool::fuzz
