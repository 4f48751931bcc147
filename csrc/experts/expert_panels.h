// The packed panels of all experts of a layer that one job reads: of gate and up in turns, or of down. Only here stands
// where they lie and which task reads which of them, for whoever packs, computes, copies or fetches ahead.
#pragma once

#include <span>

#include "experts/node_slices.h"
#include "formats/packed_matrix.h"

namespace ktqueue {

class ExpertPanels {
  public:
    // Each of `experts` has so many panels. Throws std::bad_alloc.
    ExpertPanels(size_t nodes, size_t experts, size_t panels, size_t panel_bytes)
        : panels_(panels),
          panel_bytes_(panel_bytes),
          slices_(nodes, experts, panels),
          arena_(experts * panels * panel_bytes) {}

    size_t panels() const { return panels_; }  // of one expert
    size_t panel_bytes() const { return panel_bytes_; }
    size_t bytes() const { return arena_.bytes(); }  // of all experts
    const NodeSlices& slices() const { return slices_; }

    // Panels first..last-1 of one expert; they must be of one NUMA node, as those of one task are.
    std::span<uint8_t> range(size_t expert, size_t first, size_t last) const {
        return {arena_.data() + slices_.place(expert, first) * panel_bytes_, (last - first) * panel_bytes_};
    }

  private:
    size_t panels_, panel_bytes_;
    NodeSlices slices_;
    Arena arena_;
};

// A job over all panels of so many experts, `step` panels a task. Which experts these are, only its user knows.
struct PanelJob {
    const ExpertPanels& panels;
    size_t experts, step;

    size_t tasks() const { return panels.slices().tasks(experts, step); }
    NodeSlices::Block block(size_t task) const { return panels.slices().block(task, experts, step); }
};

}  // namespace ktqueue
