// The check that ends a trial as a failure.
#pragma once

#include <stdexcept>
#include <string>

namespace farpool::fuzz {

inline void require(bool holds, const std::string& what) {
    if (!holds) {
        throw std::logic_error(what);
    }
}

}  // namespace farpool::fuzz
