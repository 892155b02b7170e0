// The tile scheduler of GEMMs of many tokens.

// A tile's index along features and along tokens.
struct Tile { u32 feature, token; };

// Tiles that are computed concurrently share operands in L2: the order is panel by panel, each `width` tiles of
// features wide, and inside a panel the tiles of one tile of tokens are next to each other.
struct Rasterization {
    u32 feature_tiles, token_tiles, width;

    __device__ __forceinline__ u32 tiles() const { return feature_tiles * token_tiles; }
    __device__ __forceinline__ Tile tile(u32 index) const {
        const u32 of_panel = width * token_tiles, panel = index / of_panel, inside = index - panel * of_panel;
        const u32 beside = min(width, feature_tiles - panel * width);
        return Tile{panel * width + inside % beside, inside / beside};
    }
};
