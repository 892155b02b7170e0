//! scratch
use std::ops::ControlFlow;
use twofour::{
    file::{self, Overwrite},
    select::Selector,
};
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let t = std::time::Instant::now();
    let mut phase = None;
    file::prune(&a[1], &a[2], Overwrite::Yes, &mut |_| Some(Selector::TWO_FOUR), &mut |p| {
        if phase != Some(p.phase) {
            eprintln!("{:?} {:?}", p.phase, t.elapsed());
            phase = Some(p.phase);
        }
        ControlFlow::Continue(())
    })
    .unwrap();
    println!("{:.2} s", t.elapsed().as_secs_f64());
}
