// How the panels of a stack of matrices lie over NUMA nodes, and the tasks that go over them in that order.
//
// Each node has a slice of every matrix: a run of its panels (for experts: of the intermediate size), never a copy. In
// memory a node's slices of all matrices follow one another, so that pages belong to one node, and tasks are numbered
// node by node: the pool gives the first tasks to the threads of the first node. Whoever packs a panel touches it first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace ktqueue {

class NodeSlices {
  public:
    // Panels of one matrix that one task takes: `first` .. `last` - 1 of the `item`-th matrix of the job.
    struct Block {
        size_t item, first, last;
    };

    // `matrices` of `panels` each. Slices hold an even number of panels, but for the last one.
    NodeSlices(size_t nodes, size_t matrices, size_t panels) : matrices_(matrices) {
        for (size_t node = 0; node <= nodes; ++node)
            first_.push_back(node == nodes ? panels : panels * node / nodes / 2 * 2);
    }

    // Where a panel lies, counted in panels. Those of one Block lie side by side.
    size_t place(size_t matrix, size_t panel) const {
        const size_t node = node_of(panel), size = first_[node + 1] - first_[node];
        return matrices_ * first_[node] + matrix * size + panel - first_[node];
    }

    // Tasks of a job over `items` matrices, `step` panels a task.
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

}  // namespace ktqueue
