// The packed panels of all experts of a layer that one job reads: gate and up alternating, or down. The only
// description of where a panel is and which task reads it; packing, computing, copying and prefetching all use it.
//
// Each node has a slice of every matrix: a run of its panels (for experts: of the intermediate size), never a copy.
// memory   | node 0: slice of matrix 0, slice of matrix 1, ... | node 1: slice of matrix 0, ... |
// Invariants:
// - A node's slices of all matrices are adjacent in memory, so that whole pages belong to one node.
// - Tasks are numbered node by node, and the pool gives the first tasks to the threads of the first node.
// - The thread that packs a panel is the first to touch its page, which places the page on the thread's node.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "formats/packed_matrix.h"

namespace ktqueue {

class NodeSlices {
  public:
    // The panels of one matrix that one task takes: `first` .. `last` - 1 of matrix `item` of the job.
    struct Block {
        size_t item, first, last;
    };

    // `matrices` of `panels` each. Slices have an even number of panels, except the last one.
    NodeSlices(size_t nodes, size_t matrices, size_t panels) : matrices_(matrices) {
        for (size_t node = 0; node <= nodes; ++node)
            first_.push_back(node == nodes ? panels : panels * node / nodes / 2 * 2);
    }

    // The index of a panel in memory, in panels. The panels of one Block are adjacent.
    size_t place(size_t matrix, size_t panel) const {
        const size_t node = node_of(panel), size = first_[node + 1] - first_[node];
        return matrices_ * first_[node] + matrix * size + panel - first_[node];
    }

    // The number of tasks of a job over `items` matrices, with `step` panels per task.
    size_t tasks(size_t items, size_t step) const {
        size_t count = 0;
        for (size_t node = 0; node + 1 < first_.size(); ++node) count += items * blocks(node, step);
        return count;
    }

    Block block(size_t task, size_t items, size_t step) const {
        size_t node = 0;
        while (task >= items * blocks(node, step)) task -= items * blocks(node++, step);
        const size_t first = first_[node] + task % blocks(node, step) * step;
        return {task / blocks(node, step), first, std::min(first + step, first_[node + 1])};
    }

  private:
    size_t node_of(size_t panel) const {
        return static_cast<size_t>(std::upper_bound(first_.begin(), first_.end() - 1, panel) - first_.begin()) - 1;
    }
    size_t blocks(size_t node, size_t step) const { return (first_[node + 1] - first_[node] + step - 1) / step; }

    size_t matrices_;
    std::vector<size_t> first_;  // [nodes + 1] panel
};

class ExpertPanels {
  public:
    // `panels`: of each expert. Throws std::bad_alloc.
    ExpertPanels(size_t nodes, size_t experts, size_t panels, size_t panel_bytes)
        : panels_(panels),
          panel_bytes_(panel_bytes),
          slices_(nodes, experts, panels),
          arena_(experts * panels * panel_bytes) {}

    size_t panels() const { return panels_; }  // of one expert
    size_t panel_bytes() const { return panel_bytes_; }
    size_t bytes() const { return arena_.bytes(); }  // of all experts
    const NodeSlices& slices() const { return slices_; }

    // Panels first..last-1 of one expert. They must belong to one NUMA node, as the panels of one task do.
    std::span<uint8_t> range(size_t expert, size_t first, size_t last) const {
        return {arena_.data() + slices_.place(expert, first) * panel_bytes_, (last - first) * panel_bytes_};
    }

  private:
    size_t panels_, panel_bytes_;
    NodeSlices slices_;
    Arena arena_;
};

// A job over all panels of `experts` experts, with `step` panels per task. Only the caller knows which experts these
// are.
struct PanelJob {
    const ExpertPanels& panels;
    size_t experts, step;

    size_t tasks() const { return panels.slices().tasks(experts, step); }
    NodeSlices::Block block(size_t task) const { return panels.slices().block(task, experts, step); }
};

}  // namespace ktqueue
