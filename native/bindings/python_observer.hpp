// A Python object that follows a driver in debug mode.
#pragma once

#include <memory>
#include <span>
#include <utility>

#include "bindings/bound_pager.hpp"
#include "pager/driver.hpp"

// Every thread that calls a driver holds the interpreter lock, and so these calls do, too.
class PythonObserver : public farpool::pager::Observer {
public:
    // `watch`: a `farpool.memory.debug.Watch`, or an object with the same methods.
    explicit PythonObserver(nb::object watch) : watch_(std::move(watch)) {}

    void starting(std::span<const farpool::pager::Command> commands) override {
        nb::list converted;
        for (const farpool::pager::Command& command : commands) {
            converted.append(to_python(command));
        }
        commands_ = converted;
        watch_.attr("starting")(converted);
    }
    void moved(std::size_t index) override { watch_.attr("moved")(commands_[index]); }
    void ended(farpool::pager::TransferId transfer, bool failed) override { watch_.attr("ended")(transfer, failed); }
    void granted(const std::shared_ptr<farpool::pager::Access>& access, nb::handle uses, nb::handle op) {
        watch_.attr("granted")(access, uses, op);
    }
    void released(const farpool::pager::Access& access) override {
        if (const nb::object known = nb::find(access); known.is_valid()) {  // else the object has never heard of it
            watch_.attr("released")(known);
        }
    }
    void raise_findings() override { watch_.attr("raise_findings")(); }

    nb::handle object() const { return watch_; }

private:
    nb::object watch_;
    nb::list commands_;  // the latest
};
