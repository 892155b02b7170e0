// The order in which products of many tokens take their tiles.

// By number, features' and tokens'.
struct Tile { u32 feature, token; };

// Neighbours in time share what they read: tiles are taken panel after panel, so many tiles of features wide, those of one tile of tokens next to each other.
struct Panels {
    u32 feature_tiles, token_tiles, width;

    __device__ __forceinline__ u32 tiles() const { return feature_tiles * token_tiles; }
    __device__ __forceinline__ Tile tile(u32 index) const {
        const u32 of_panel = width * token_tiles, panel = index / of_panel, inside = index - panel * of_panel;
        const u32 beside = min(width, feature_tiles - panel * width);
        return Tile{panel * width + inside % beside, inside / beside};
    }
};
