// Memory that is there before somebody needs it.
#pragma once

#include <cstddef>
#include <span>
#include <thread>

namespace pyserve {

// The system gives memory when it is first written, and a huge page may cost milliseconds then,
// above all in a virtual machine. The thread that is returned takes the memory, from its beginning
// on, in time that nobody else wants; contents stay. It ends when it is through, or is told to
// stop. The memory must outlive it. Where the system cannot do this, nothing is done.
std::jthread prefault(std::span<std::byte> memory);

}  // namespace pyserve
