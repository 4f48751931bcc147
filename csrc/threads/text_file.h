// Reads a small text file whole. The C library's files, not C++ streams: streams break where a process holds two C++
// runtimes, as it may beside torch.
#pragma once

#include <cstdio>
#include <string>

namespace ktqueue {

// The file's text; empty where it cannot be read.
inline std::string read_text(const std::string& path) {
    std::string text;
    if (FILE* file = std::fopen(path.c_str(), "r")) {
        char part[1024];
        for (size_t count; (count = std::fread(part, 1, sizeof(part), file)) > 0;) text.append(part, count);
        std::fclose(file);
    }
    return text;
}

}  // namespace ktqueue
