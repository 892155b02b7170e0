//! A file of images or of labels from a stranger, as it is or in gzip: what is accepted has as many values as its sizes
//! say, is the same when it is written and read again, and becomes a set of images.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use twofour_nn::train::{Idx, ImageSet};

/// The contents of a file.
fn written(idx: &Idx) -> Vec<u8> {
    let sizes = idx.sizes.iter().flat_map(|size| (*size as u32).to_be_bytes());
    [0, 0, 8, idx.sizes.len() as u8].into_iter().chain(sizes).chain(idx.values.iter().copied()).collect()
}

fuzz_target!(|bytes: &[u8]| {
    let path = Path::new("stranger");
    if let Ok(labels) = Idx::labels_from(bytes, path) {
        assert_eq!(labels.sizes, [labels.values.len()]);
        assert_eq!(Idx::labels_from(written(&labels).as_slice(), path).expect("our own file is accepted"), labels);
    }
    let Ok(images) = Idx::images_from(bytes, path) else { return };
    assert_eq!(images.sizes.iter().product::<usize>(), images.values.len());
    assert_eq!(Idx::images_from(written(&images).as_slice(), path).expect("our own file is accepted"), images);
    let shape = [images.sizes[1], images.sizes[2], images.sizes.get(3).copied().unwrap_or(1)];
    let labels = vec![0; images.sizes[0]];
    let set = ImageSet::new(shape, images.values, labels, 0.25).expect("as many labels as images");
    assert_eq!(set.training().len() + set.validation().len(), set.labels().len());
    assert!(set.images().all(|image| image.len() == shape.iter().product::<usize>()));
});
