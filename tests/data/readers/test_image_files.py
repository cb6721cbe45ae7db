import logging

import numpy as np
import pytest
from PIL import Image

from fedrema.data import load_user_data
from fedrema.data.readers.image_files import load_images
from fedrema.data.roles import TableOptions
from fedrema.errors import BadInput


def draw(path, value=0, size=(6, 4), mode="L"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)
    return path


def test_a_folder_of_clients_and_classes(tmp_path):
    for number, client in enumerate(("10", "9")):
        for kind in ("cat", "dog"):
            for image in range(3):
                draw(tmp_path / client / kind / f"{image}.png", 10 * number + image)
    (tmp_path / "9" / "cat" / "notes.txt").write_text("hello")
    (tmp_path / ".hidden").mkdir()
    federation = load_user_data(str(tmp_path))
    assert federation.names == ("9", "10")
    assert federation.class_names == ("cat", "dog")
    assert federation.x.dtype == np.uint8
    assert federation.sample_shape == (1, 4, 6)
    assert federation.x[:, 0, 0, 0].tolist() == [10, 11, 12, 10, 11, 12, 0, 1, 2, 0, 1, 2]


def test_a_folder_with_splits(tmp_path):
    for client in ("a", "b"):
        for part, images in (("train", 3), ("test", 1)):
            for kind in ("x", "y"):
                for image in range(images):
                    draw(tmp_path / client / part / kind / f"{image}.bmp")
    federation = load_user_data(str(tmp_path))
    assert federation.split("train").count.tolist() == [6, 6]
    assert federation.split("test").count.tolist() == [2, 2]
    draw(tmp_path / "c" / "x" / "0.png")
    with pytest.raises(BadInput, match=r"client 'c' has no folders train and test but others have"):
        load_user_data(str(tmp_path))


def test_images_are_resized_and_grey_only_if_all_are(tmp_path):
    grey, colour = draw(tmp_path / "a.png", 200), draw(tmp_path / "b.png", (255, 0, 7), (100, 80), "RGB")
    both = load_images([grey, colour])
    assert both.shape == (2, 3, 4, 6)
    assert both[0, :, 0, 0].tolist() == [200, 200, 200]
    assert both[1, :, 2, 2].tolist() == [255, 0, 7]
    assert load_images([colour]).shape == (1, 3, 64, 64)
    assert load_images([grey], 9).shape == (1, 1, 9, 9)
    deep = draw(tmp_path / "c.png", 40_000, mode="I;16")
    assert load_images([deep])[0, 0, 0, 0] == 40_000 >> 8
    photo = draw(tmp_path / "d.jpg", (20, 40, 60), mode="RGB")
    assert load_images([photo]).shape == (1, 3, 4, 6)


def test_a_table_of_paths(tmp_path, caplog):
    lines = ["site,file,age,label"]
    for number in range(6):
        draw(tmp_path / "pictures" / f"{number}.PNG", number)
        lines.append(f"{'north' if number < 3 else 'south'},pictures/{number}.PNG,{number},{'ab'[number % 2]}")
    (tmp_path / "table.csv").write_text("\n".join(lines))
    with caplog.at_level(logging.WARNING, "fedrema"):
        federation = load_user_data(str(tmp_path / "table.csv"), options=TableOptions(image_size=8))
    assert federation.sample_shape == (1, 8, 8)
    assert federation.x[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert caplog.messages == ["Note: images are the only inputs; these columns are not used: age."]
    (tmp_path / "table.csv").write_text("\n".join(lines).replace("pictures/4", "pictures/9"))
    with pytest.raises(BadInput, match=r"the image .*pictures/9.PNG does not exist\.$"):
        load_user_data(str(tmp_path / "table.csv"))
    (tmp_path / "table.csv").write_text("\n".join(lines).replace("pictures/4.PNG", ""))
    with pytest.raises(BadInput, match=r"column 'file' is empty in data row 5 of table.csv \(client 'south'\)"):
        load_user_data(str(tmp_path / "table.csv"))
    with pytest.raises(BadInput, match=r"--scale has no meaning for images"):
        load_user_data(str(tmp_path / "table.csv"), options=TableOptions(scale="site"))


def test_damaged_images_and_wrong_folders_are_refused(tmp_path):
    draw(tmp_path / "a" / "x" / "1.png")
    (tmp_path / "a" / "x" / "2.png").write_bytes((tmp_path / "a" / "x" / "1.png").read_bytes()[:40])
    with pytest.raises(BadInput, match=r"the image .*a/x/2.png cannot be read; it may be damaged\.$"):
        load_user_data(str(tmp_path))
    (tmp_path / "b").mkdir()
    with pytest.raises(BadInput, match=r"/b has no images in folders of classes; images must be at client/class/image"):
        load_user_data(str(tmp_path))
    with pytest.raises(BadInput, match=r"--target has no meaning for .*, which holds images"):
        load_user_data(str(tmp_path), options=TableOptions(target="y"))


def test_an_image_size_needs_images(tmp_path):
    (tmp_path / "t.csv").write_text("client,a,y\n1,2,3\n")
    with pytest.raises(BadInput, match=r"--image-size 8 has no meaning for a table without image files"):
        load_user_data(str(tmp_path / "t.csv"), options=TableOptions(image_size=8))
